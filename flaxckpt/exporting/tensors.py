"""What is exported: the leaves that are wanted, their names, and whether safetensors holds them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from flaxckpt.errors import UnsupportedLeafError
from flaxckpt.formats.safetensors_header import CODES, METADATA
from flaxckpt.leaves import handler
from flaxckpt.leaves.dtypes import parse_dtype
from flaxckpt.leaves.lazy import LazyArray
from flaxckpt.leaves.record import ARRAY_KINDS, SCALAR_KINDS, LeafSpec, StoredArray
from flaxckpt.restoring.source import SavedLeaf
from flaxckpt.tree import nnx_objects
from flaxckpt.tree.keypaths import parse_name
from flaxckpt.tree.structure import flatten

Rename = Callable[[str], str | None] | Mapping[str, str | None] | None
Array = jax.Array | np.ndarray | StoredArray | LazyArray


class Candidate(NamedTuple):
    """A leaf that may be exported.

    Attributes:
      leaf: its key path.
      load: gives its type and what is stored of it. An `UnsupportedLeafError` says why it cannot.
    """

    leaf: str
    load: Callable[[], tuple[LeafSpec, Any]]

    @property
    def name(self) -> str:
        """Its key path with dots."""
        return ".".join(map(str, parse_name(self.leaf)))


class Tensor(NamedTuple):
    """A leaf that is exported.

    Attributes:
      leaf: its key path.
      name: what it is called in the file.
      dtype: that of the file.
      array: its values.
    """

    leaf: str
    name: str
    dtype: np.dtype
    array: Array

    @property
    def nbytes(self) -> int:
        """Its size in the file, in bytes."""
        return math.prod(self.array.shape) * self.dtype.itemsize


def candidates_of(tree_or_leaves: Any, *, is_tree: bool) -> list[Candidate]:
    """The leaves of a tree, or those of an opened checkpoint."""
    if is_tree:
        flat = flatten(nnx_objects.split(tree_or_leaves)[0])
        pairs = zip(flat.names, flat.leaves, strict=True)
        return [Candidate(n, functools.partial(handler.encode, leaf, n)) for n, leaf in pairs]
    leaves: Sequence[SavedLeaf] = tree_or_leaves
    return [Candidate(leaf.name, functools.partial(_saved, leaf)) for leaf in leaves]


def _saved(leaf: SavedLeaf) -> tuple[LeafSpec, Any]:
    """The type of a saved leaf, and its array."""
    return leaf.spec, leaf.array


def choose(
    candidates: Sequence[Candidate], rename: Rename, floating: np.dtype | None
) -> list[Tensor]:
    """The tensors to write, in the order of the leaves.

    Args:
      candidates: all leaves.
      rename: as of `export`.
      floating: what floating-point arrays become.

    Raises:
      UnsupportedLeafError: when there are leaves that the format cannot hold; all are listed.
      ValueError: when two get the same name, or one a name that cannot be.
    """
    tensors, problems = [], []
    for name, candidate in _named(candidates, rename).items():
        try:
            tensors.append(_tensor(candidate, name, floating))
        except UnsupportedLeafError as error:
            why = str(error).removeprefix(f"the leaf {candidate.leaf}: ")
            problems.append(f"\n  {candidate.name}: {why}")
    if problems:
        raise UnsupportedLeafError(
            f"{len(problems)} of {len(candidates)} leaves cannot be written to safetensors:"
            f"{''.join(problems)}\nPass rename=, a function that returns None for the names of "
            "these, to leave them out."
        )
    return tensors


def _named(candidates: Sequence[Candidate], rename: Rename) -> dict[str, Candidate]:
    """The leaves that are wanted, by the names that they get."""
    names = [candidate.name for candidate in candidates]
    if isinstance(rename, Mapping) and (unknown := [n for n in rename if n not in set(names)]):
        raise ValueError(
            f"rename= has names that no leaf has: {unknown}. There are, among others, {names[:8]}."
        )
    found: dict[str, Candidate] = {}
    for candidate in candidates:
        name = _renamed(candidate.name, rename)
        if name is None:
            continue
        if name in found:
            raise ValueError(
                f"the leaves {found[name].leaf} and {candidate.leaf} would both be called "
                f"{name!r}. Give one of them another name by rename=."
            )
        found[name] = candidate
    return found


def _renamed(name: str, rename: Rename) -> str | None:
    """What the leaf `name` is called in the file; `None` to leave it out."""
    if rename is None:
        new: str | None = name
    else:
        new = rename.get(name, name) if isinstance(rename, Mapping) else rename(name)
    if new is None:
        return None
    if not isinstance(new, str) or new == METADATA or not _is_unicode(new):
        raise ValueError(
            f"the leaf {name} cannot be called {new!r} in a safetensors file. Let rename= return "
            f"another string, or None to leave it out."
        )
    return new


def _is_unicode(name: str) -> bool:
    """Whether a name has no half of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def _tensor(candidate: Candidate, name: str, floating: np.dtype | None) -> Tensor:
    """The tensor `name`.

    Raises:
      UnsupportedLeafError: when the format cannot hold it.
    """
    spec, array = candidate.load()
    if spec.kind not in ARRAY_KINDS | SCALAR_KINDS or not hasattr(array, "shape"):
        raise UnsupportedLeafError(f"{spec} is no array of numbers")
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        raise UnsupportedLeafError(
            "it is spread over several processes. Save a checkpoint, and export that in one of them"
        )
    dtype = _dtype_of(array)
    if floating is not None and jax.dtypes.issubdtype(dtype, np.floating):
        dtype = floating
    if dtype.name not in CODES:
        raise UnsupportedLeafError(f"the format has no dtype {dtype.name}")
    return Tensor(candidate.leaf, name, dtype, array)


def _dtype_of(array: Any) -> np.dtype:
    """The dtype of an array, in the byte order of the file."""
    dtype = parse_dtype(array.dtype) if isinstance(array.dtype, str) else np.dtype(array.dtype)
    return dtype.newbyteorder("<") if dtype.byteorder == ">" else dtype
