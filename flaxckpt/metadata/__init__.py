"""The JSON files of a checkpoint: ours, and the ones that Orbax reads."""
