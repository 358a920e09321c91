"""Items that are pytrees, written like the state, and single random keys of jax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from flaxckpt.items.item import JAX_KEY, STANDARD, Encoded, ItemTree, ProcessRank, SavedItem
from flaxckpt.store import layout

# What Orbax calls the one array of its own.
_NAME = "checkpoint"
# The implementation that Orbax takes a key for, and the shapes of raw keys.
_IMPL = "threefry2x32"
_RAW_SHAPES = ((2,), (4,))


class TreeItems:
    """Any pytree: whatever nothing else is for."""

    def knows(self, value: Any, rank: ProcessRank) -> bool:
        """See `ItemHandler`."""
        del value, rank
        return True

    def encode(self, value: Any) -> Encoded:
        """The tree; whether a checkpoint can hold its leaves is seen when it is taken apart."""
        return Encoded(tree=ItemTree("", value), orbax=STANDARD)

    def read(self, saved: SavedItem, target: Any) -> Callable[[], Any]:
        """As `restore` reads the state."""
        value = saved.tree(target)
        return lambda: value


class JaxKeyItems:
    """One PRNG key of jax, typed or raw, in the way of Orbax."""

    def knows(self, value: Any, rank: ProcessRank) -> bool:
        """Orbax wraps the words with the default implementation; other keys are trees."""
        del rank
        if not isinstance(value, jax.Array):
            return False
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            return str(jax.random.key_impl(value)) == _IMPL
        return value.dtype == "uint32" and value.shape in _RAW_SHAPES

    def encode(self, value: Any) -> Encoded:
        """A tree, and the file that tells Orbax of what kind it is."""
        typed = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        key, text = layout.JAX_KEY, b'{"typed": true}' if typed else b'{"typed": false}'
        tree = ItemTree(key, {_NAME: value}, has_plain_keys=True)
        return Encoded({f"{key}_metadata/{layout.JSON_FILE}": text}, tree=tree, orbax=JAX_KEY)

    def read(self, saved: SavedItem, target: Any) -> Callable[[], Any]:
        """A new key, where the target is; keys are immutable."""
        value = saved.tree(None if target is None else {_NAME: target})[_NAME]
        return lambda: value
