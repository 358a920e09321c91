"""Looking into a checkpoint: what it holds, one leaf at a time, and whether it is whole."""
