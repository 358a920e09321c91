"""Named things that are saved beside the state."""
