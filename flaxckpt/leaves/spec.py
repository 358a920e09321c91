"""What a leaf is, and the arrays that are saved of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from flaxckpt.leaves.dtypes import dtype_name, parse_dtype
from flaxckpt.sharding.chunks import Region, Shape

# What is known of a leaf without its value: the spec of a leaf, and the record of a saved one.


# Kinds that are one number or an array of numbers, and may become one another on restore.
SCALAR_KINDS = frozenset({"bool", "int", "float", "complex"})
ARRAY_KINDS = frozenset({"jax", "numpy", "numpy_scalar"})
# Kinds that live on devices.
DEVICE_KINDS = frozenset({"jax", "prng_key"})


class LeafSpec(NamedTuple):
    """The type of a leaf, of a checkpoint or of a target.

    Attributes:
      kind: the name of its handler: `jax`, `numpy`, `numpy_scalar`, `bool`, `int`, `float`,
        `complex`, `str`, `bytes`, `numpy_str`, `numpy_bytes`, `strings`, `prng_key`, `generator`,
        or one of the user's.
      dtype: the name of the dtype of an array or numpy scalar.
      shape: the shape of an array; of a key array without the axis of the key's words.
      weak_type: jax's weak type.
      impl: the implementation of a PRNG key, or the bit generator of a `Generator`.
    """

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    weak_type: bool = False
    impl: str = ""

    def __str__(self) -> str:
        """As errors show it: `float32[512,10]`, `key<rbg>[3]`, `int`."""
        dims = f"[{','.join(map(str, self.shape))}]"
        if self.kind in ARRAY_KINDS:
            scalar = " scalar" if self.kind == "numpy_scalar" else dims
            return self.dtype + scalar
        if self.kind == "prng_key":
            return f"key<{self.impl}>{dims}"
        return f"{self.kind}<{self.impl}>" if self.impl else self.kind


class StoredArray(NamedTuple):
    """An array of a checkpoint: what its leaf's handler gave to the storage.

    Attributes:
      store: its name in the key-value store.
      dtype: the name of its dtype, as in `leaves.dtypes`.
      shape: its shape, without the axis that a dtype stored as bytes adds.
      chunks: the shape of a chunk, in the same axes.
      sharding: how it was sharded when it was saved; JSON, for people. Never needed to read it.
    """

    store: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    sharding: Any = None

    @property
    def nbytes(self) -> int:
        """Its size in bytes, uncompressed."""
        return math.prod(self.shape) * parse_dtype(self.dtype).itemsize


class LeafRecord(NamedTuple):
    """One leaf of a checkpoint.

    Attributes:
      name: its key path.
      spec: its type.
      array: where its array lies, when it has one.
      value: otherwise its value as JSON.
    """

    name: str
    spec: LeafSpec
    array: StoredArray | None = None
    value: Any = None


# Arrays that lie somewhere else and are read in parts, whatever format they are in.


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
