"""From what lies in a checkpoint to what the caller wants: matching first, then reading."""
