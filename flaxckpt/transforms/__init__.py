"""Rules that change what a checkpoint holds on its way into a target: one kind a file."""
