"""Arrays that lie somewhere else and are read in parts, whatever format they are in."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from flaxckpt.leaves.dtypes import dtype_name, parse_dtype
from flaxckpt.leaves.record import LeafSpec
from flaxckpt.sharding.chunks import Region, Shape


class LazyArray(Protocol):
    """An array whose type is known and whose elements are read when they are needed."""

    @property
    def dtype(self) -> str:
        """The name of its dtype, as in `leaves.dtypes`."""

    @property
    def shape(self) -> Shape:
        """Its shape."""

    @property
    def chunks(self) -> Shape:
        """The shape of what is best read at once."""

    @property
    def sharding(self) -> Any:
        """How it was sharded when it was saved, as `StoredArray.sharding`; `None` if unknown."""

    def read(self, regions: Sequence[Region]) -> Sequence[np.ndarray]:
        """The elements of each of `regions`, in C order, with the dtype.

        Raises:
          CorruptCheckpointError: when bytes of it are missing or damaged.
        """


@dataclasses.dataclass(frozen=True, eq=False)
class LazyLeaf:
    """A leaf in the tree that a reader of another format gives: its type, and its array.

    Attributes:
      spec: what it was. A PRNG key has an array of words, a Python number one of no axes.
      array: its values.
    """

    spec: LeafSpec
    array: LazyArray


@dataclasses.dataclass(frozen=True, eq=False)
class InMemory:
    """An array that was read already, because its format has no parts."""

    values: np.ndarray

    @property
    def dtype(self) -> str:
        """The name of its dtype."""
        name = dtype_name(self.values.dtype)
        assert name is not None, "whoever made it has looked"
        return name

    @property
    def shape(self) -> Shape:
        """Its shape."""
        return self.values.shape

    @property
    def chunks(self) -> Shape:
        """All of it."""
        return self.values.shape

    @property
    def sharding(self) -> Any:
        """It was on one device, or nobody knows."""
        return None

    def read(self, regions: Sequence[Region]) -> Sequence[np.ndarray]:
        """Copies: several leaves may be made of it, and each is its owner's."""
        return [np.array(self.values[region.slices], order="C") for region in regions]


class TypedArray(Protocol):
    """Anything that is known to be an array."""

    @property
    def dtype(self) -> str:
        """The name of its dtype."""

    @property
    def shape(self) -> Shape:
        """Its shape."""


def nbytes_of(array: TypedArray) -> int:
    """The size of an array in bytes."""
    return math.prod(array.shape) * parse_dtype(array.dtype).itemsize


class WithArray(Protocol):
    """A leaf that has an array, or none."""

    @property
    def array(self) -> TypedArray | None:
        """Its array."""


def total_nbytes(leaves: Iterable[WithArray]) -> int:
    """The size of the arrays of `leaves`, in bytes."""
    return sum(nbytes_of(leaf.array) for leaf in leaves if leaf.array is not None)
