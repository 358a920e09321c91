"""Writing other formats."""
