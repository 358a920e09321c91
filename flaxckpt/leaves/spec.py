"""What is known of a leaf without its values: its type, and the record of a saved one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from flaxckpt.leaves.dtypes import parse_dtype
from flaxckpt.sharding.chunks import Shape

if TYPE_CHECKING:
    import numpy as np
    from jax.sharding import NamedSharding

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
    """The record of a saved array, in flaxckpt's own format.

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
    """The record of a saved leaf, in flaxckpt's own format.

    Attributes:
      name: its key path.
      spec: its type.
      array: its array, if it has one.
      value: otherwise its value as JSON.
    """

    name: str
    spec: LeafSpec
    array: StoredArray | None = None
    value: Any = None

    @property
    def nbytes(self) -> int:
        """The size of its array in bytes."""
        return 0 if self.array is None else self.array.nbytes


@dataclasses.dataclass(frozen=True)
class LeafInfo:
    """One leaf of an inspected checkpoint. As the leaf of a target it stands for the saved type.

    Attributes:
      name: its key path.
      spec: its type.
      nbytes: the size of its array, in bytes; 0 for other leaves.
      chunks: the shape of a chunk on disk.
      mesh: the axes of the mesh that it was saved on, with their sizes; `None` off a mesh.
      partition: the entries of its PartitionSpec on that mesh.
    """

    name: str
    spec: LeafSpec
    nbytes: int = 0
    chunks: Shape = ()
    mesh: Mapping[str, int] | None = None
    partition: tuple[Any, ...] = ()

    @property
    def kind(self) -> str:
        """The kind of leaf: `jax`, `numpy`, `int`, `str`, `prng_key`, ..."""
        return self.spec.kind

    @property
    def shape(self) -> Shape:
        """The shape of an array; `()` for other leaves."""
        return self.spec.shape

    @property
    def dtype(self) -> np.dtype | None:
        """The dtype of an array or a numpy scalar; `None` for other leaves."""
        return parse_dtype(self.spec.dtype) if self.spec.dtype else None

    @property
    def weak_type(self) -> bool:
        """The weak type of a `jax.Array`."""
        return self.spec.weak_type

    @property
    def sharding(self) -> NamedSharding | None:
        """The saved sharding, if the devices here form its mesh; `None` otherwise."""
        # `flaxckpt show` does without jax.
        from jax.sharding import NamedSharding, PartitionSpec

        from flaxckpt.sharding.meshes import mesh_like

        mesh = None if self.mesh is None else mesh_like(tuple(self.mesh.items()))
        return None if mesh is None else NamedSharding(mesh, PartitionSpec(*self.partition))
