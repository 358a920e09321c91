"""The names that items may have."""

from __future__ import annotations

from collections.abc import Iterable

from flaxckpt.errors import ItemError
from flaxckpt.storage import layout

# What has another meaning in a checkpoint, to Orbax, or as an argument of `save`.
RESERVED = frozenset(
    {
        *(layout.ITEM, layout.PINNED, "default", "descriptor", "metrics", "metadata", "pytree"),
        *("items", "orbax", "overwrite", "path", "self", "step", "t", "tree", "wait"),
    }
)
MAX_LENGTH = 64


def check_names(names: Iterable[object]) -> None:
    """Refuses names that items cannot have.

    Raises:
      ItemError: for the first one.
    """
    for name in names:
        if not isinstance(name, str) or not layout.may_be_item(name) or len(name) > MAX_LENGTH:
            raise ItemError(
                f"{name!r} cannot be the name of an item: it needs ASCII letters, digits and "
                f"underscores, a letter first, at most {MAX_LENGTH}. Rename it."
            )
        if name in RESERVED:
            raise ItemError(
                f"{name!r} cannot be the name of an item: it has another meaning. Rename it."
            )
