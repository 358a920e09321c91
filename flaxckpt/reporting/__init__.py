"""One page about a run: what it has, what it cost, and how the state changed."""
