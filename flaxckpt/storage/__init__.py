"""Names on disk, the key-value store, and the commit. Knows nothing of Flax."""
