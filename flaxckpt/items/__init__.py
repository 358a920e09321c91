"""Named things in a checkpoint beside the state: iterators, configurations, random generators."""
