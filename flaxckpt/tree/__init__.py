"""A pytree as data: key paths, names, structure, matching."""
