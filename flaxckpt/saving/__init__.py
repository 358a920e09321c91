"""From the state of the caller to the files of a checkpoint."""
