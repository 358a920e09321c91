"""What can be restored from: an open checkpoint, its leaves, and reads of their chunks."""
