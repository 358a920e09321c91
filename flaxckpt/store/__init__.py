"""Where a checkpoint lies: a Store, in a directory or in a bucket."""
