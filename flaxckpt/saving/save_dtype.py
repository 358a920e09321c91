"""Saving floats with fewer bits than the state has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

from flaxckpt.errors import UnsupportedLeafError
from flaxckpt.leaves.array import check_concrete, is_key_dtype
from flaxckpt.leaves.dtypes import parse_dtype
from flaxckpt.options import SaveDtype
from flaxckpt.tree import nnx_objects
from flaxckpt.tree.structure import flatten


def as_saved(tree: Any, wanted: SaveDtype | None) -> Any:
    """`tree` with its floating arrays as they are to be saved; nothing else changes.

    Example:
      >>> tree = {"w": np.ones(2, np.float32), "step": 3}
      >>> as_saved(tree, {"w|b": "float16"})["w"].dtype, as_saved(tree, None) is tree
      (dtype('float16'), True)
    """
    if wanted is None:
        return tree
    stateful = nnx_objects.split(tree)[0]
    flat = flatten(stateful)
    pairs = zip(flat.leaves, flat.names, strict=True)
    cast = [_cast(leaf, name, wanted) for leaf, name in pairs]
    return jax.tree.unflatten(jax.tree.structure(stateful), cast)


def _cast(leaf: Any, name: str, wanted: SaveDtype) -> Any:
    """The leaf `name` as it is saved: never with more bits than it has.

    Raises:
      UnsupportedLeafError: when it is abstract or deleted.
    """
    dtype = wanted if isinstance(wanted, str) else _first(wanted, name)
    if dtype is None or not isinstance(leaf, jax.Array | np.ndarray) or is_key_dtype(leaf.dtype):
        return leaf
    if not jax.dtypes.issubdtype(leaf.dtype, np.floating) or _bits(leaf.dtype) <= _bits(dtype):
        return leaf
    try:
        concrete = check_concrete(leaf) if isinstance(leaf, jax.Array) else leaf
    except UnsupportedLeafError as error:
        raise UnsupportedLeafError(f"the leaf {name}: {error}") from None
    return concrete.astype(parse_dtype(dtype))


def _bits(dtype: Any) -> int:
    """The size of a floating-point number."""
    return int(ml_dtypes.finfo(parse_dtype(dtype) if isinstance(dtype, str) else dtype).bits)


def _first(wanted: Mapping[str, str], name: str) -> str | None:
    """What the first pattern that matches says."""
    return next((dtype for key, dtype in wanted.items() if re.fullmatch(key, name)), None)
