"""What the commands do, apart from their arguments and what they print."""
