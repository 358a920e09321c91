"""Leaves that can be read."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from flaxckpt.leaves import kinds
from flaxckpt.leaves.dtypes import parse_dtype
from flaxckpt.leaves.spec import InMemory, LazyArray, LeafRecord, LeafSpec, StoredArray, nbytes_of
from flaxckpt.options import Options
from flaxckpt.sharding.chunks import Region, Shape
from flaxckpt.source.checkpoint import SavedLeaf, Source
from flaxckpt.source.chunk_reads import ArrayRead
from flaxckpt.source.reads import read_source

# Arrays that are made of others, and read no more of them than they are asked for.


@dataclasses.dataclass(frozen=True, eq=False)
class Derived:
    """A `LazyArray` whose `read` makes the elements of regions of what it reads of other arrays.

    Nobody sharded it, unless `sharding` says so.
    """

    dtype: str
    shape: Shape
    chunks: Shape
    read: Callable[[Sequence[Region]], Sequence[np.ndarray]]
    sharding: Any = None


def stacked(parts: Sequence[LazyArray], axis: int) -> Derived:
    """Arrays of one type along a new axis; only the parts that a region touches are read."""
    dtype, shape = parts[0].dtype, _insert(parts[0].shape, axis, len(parts))

    def read_one(region: Region) -> np.ndarray:
        inner = Region(_without(region.start, axis), _without(region.shape, axis))
        first, count = region.start[axis], region.shape[axis]
        if not count:
            return np.zeros(region.shape, parse_dtype(dtype))
        found = [part.read([inner])[0] for part in parts[first : first + count]]
        return np.stack(found, axis)

    def read(regions: Sequence[Region]) -> Sequence[np.ndarray]:
        return [read_one(region) for region in regions]

    return Derived(dtype, shape, _insert(parts[0].chunks, axis, 1), read)


def layer(whole: LazyArray, axis: int, index: int) -> Derived:
    """One index of an axis of an array."""

    def read(regions: Sequence[Region]) -> Sequence[np.ndarray]:
        outer = [Region(_insert(r.start, axis, index), _insert(r.shape, axis, 1)) for r in regions]
        return [values.squeeze(axis) for values in whole.read(outer)]

    return Derived(whole.dtype, _without(whole.shape, axis), _without(whole.chunks, axis), read)


def recast(array: LazyArray, dtype: str) -> Derived:
    """An array in another dtype."""

    def read(regions: Sequence[Region]) -> Sequence[np.ndarray]:
        return [values.astype(parse_dtype(dtype)) for values in array.read(regions)]

    return Derived(dtype, array.shape, array.chunks, read, array.sharding)


def resized(array: LazyArray, shape: Shape, pad: float) -> Derived:
    """An array with other sizes along its axes: what both have in common, and padding."""

    def read_one(region: Region) -> np.ndarray:
        values = np.full(region.shape, pad, parse_dtype(array.dtype))
        ends = zip(region.start, region.shape, array.shape, strict=True)
        there = tuple(max(0, min(start + size, end) - start) for start, size, end in ends)
        if 0 not in there:
            part = Region(region.start, there)
            values[tuple(slice(size) for size in there)] = array.read([part])[0]
        return values

    def read(regions: Sequence[Region]) -> Sequence[np.ndarray]:
        return [read_one(region) for region in regions]

    return Derived(array.dtype, shape, array.chunks, read)


def _insert(shape: Shape, axis: int, size: int) -> Shape:
    """`shape` with one more axis."""
    return (*shape[:axis], size, *shape[axis:])


def _without(shape: Shape, axis: int) -> Shape:
    """`shape` without an axis."""
    return (*shape[:axis], *shape[axis + 1 :])


# A leaf of a checkpoint that is read when it is asked for.


class Content(NamedTuple):
    """What a leaf is: its type, and its array or its value as it is stored."""

    spec: LeafSpec
    array: LazyArray | None = None
    value: Any = None


class Leaf:
    """A leaf of a checkpoint, or one that a transform makes. Nothing is read before `read`."""

    def __init__(
        self,
        name: str,
        content: Content | Callable[[], Content],
        *,
        origin: str | None = None,
        source: Source | None = None,
        is_initial: bool = False,
    ):
        """The leaf at the key path `name`; a function is called when its result is needed.

        The `origin` is the key path that it was saved at, and the `source` where; what was made
        has neither. One that `is_initial` stands for the value that the target has, or is
        initialised with.
        """
        self.name, self.origin, self.is_initial = name, origin, is_initial
        self._content, self._source = content, source

    def __repr__(self) -> str:
        """Its name, and its type if that is known."""
        known = isinstance(self._content, Content) or "content" in vars(self)
        return f"Leaf({self.name}: {self.spec if known else 'to be computed'})"

    @functools.cached_property
    def content(self) -> Content:
        """What it is."""
        return self._content if isinstance(self._content, Content) else self._content()

    def renamed(self, name: str) -> Leaf:
        """The same leaf at another key path."""
        known = isinstance(self._content, Content)
        content = self._content if known else lambda: self.content
        origin, source = self.origin, self._source
        return Leaf(name, content, origin=origin, source=source, is_initial=self.is_initial)

    @property
    def spec(self) -> LeafSpec:
        """Its type."""
        return self.content.spec

    @property
    def array(self) -> LazyArray | None:
        """Its array, if it has one."""
        return self.content.array

    @property
    def value(self) -> Any:
        """Otherwise its value, as it is stored."""
        return self.content.value

    @property
    def shape(self) -> Shape:
        """The shape of an array; what is none has none."""
        return self.spec.shape

    @property
    def dtype(self) -> np.dtype | None:
        """The dtype of an array or a numpy scalar; `None` for other leaves."""
        return parse_dtype(self.spec.dtype) if self.spec.dtype else None

    @property
    def nbytes(self) -> int:
        """The size of its array, in bytes."""
        return 0 if self.array is None else nbytes_of(self.array)

    @property
    def sharding(self) -> NamedSharding | None:
        """How it was sharded when it was saved, on a mesh without devices; `None` if it was not."""
        found = None if self.array is None else self.array.sharding
        if found is None:
            return None
        names, sizes = found["mesh"]["axis_names"], found["mesh"]["shape"]
        parts = (tuple(p) if isinstance(p, list) else p for p in found["spec"])
        return NamedSharding(AbstractMesh(tuple(sizes), tuple(names)), PartitionSpec(*parts))

    def read(self, index: Any = ...) -> Any:
        """The value: an array as numpy, everything else as it was saved.

        Args:
          index: which part of an array, as numpy would be indexed by integers, slices and `...`.

        Raises:
          CorruptCheckpointError: when bytes of it are missing or damaged.
          IndexError: when `index` does not fit the shape.

        Example:
          >>> import numpy as np
          >>> flaxckpt.save(tmp_path / "exported", {"kernel": np.arange(6).reshape(2, 3)})
          >>> flaxckpt.lazy(tmp_path / "exported")["kernel"].read(np.s_[1, :2])
          array([3, 4])
        """
        region, rest = _region(index, self.spec.shape)
        if self.array is None:
            return kinds.decode(self.spec, self.value, self.name)
        words = self.array.shape[len(self.spec.shape) :]  # of a PRNG key; other leaves have none
        whole = Region((*region.start, *(0 for _ in words)), (*region.shape, *words))
        with self._source.unchanged() if self._source else contextlib.nullcontext():
            (values,) = self.array.read([whole])
        if self.spec.kind not in ("jax", "numpy", "prng_key"):
            return kinds.decode(self.spec, values, self.name)
        if self.spec.kind == "prng_key":
            values = kinds.decode(self.spec, jax.numpy.asarray(values), self.name)
        return values[rest]


def as_leaf(value: Any, name: str) -> Leaf:
    """`value` as the leaf `name`, whether it is one already or was computed.

    Raises:
      UnsupportedLeafError: when no checkpoint could hold it.
    """
    return value.renamed(name) if isinstance(value, Leaf) else Leaf(name, content_of(value, name))


def content_of(value: Any, name: str) -> Content:
    """The content of a leaf that has `value`.

    Raises:
      UnsupportedLeafError: when no checkpoint could hold it.
    """
    spec, stored = kinds.encode(value, name)
    if isinstance(stored, np.ndarray | jax.Array):
        return Content(spec, InMemory(np.asarray(stored)))
    return Content(spec, value=stored)


def saved_leaf(source: Source, leaf: SavedLeaf, name: str, options: Options) -> Leaf:
    """A leaf of `source`, which is called `name` here, as one that can be read by itself."""
    array = leaf.array
    if isinstance(array, StoredArray):
        array = _Stored(source, leaf.name, array, options)
    return Leaf(name, Content(leaf.spec, array, leaf.value), origin=name, source=source)


def as_record(leaf: SavedLeaf) -> SavedLeaf:
    """A leaf for a restore of many: one of flaxckpt's own format is read with all the others."""
    if isinstance(leaf, Leaf) and isinstance(leaf.array, _Stored):
        return LeafRecord(leaf.array.name, leaf.spec, leaf.array.stored)
    return leaf


@dataclasses.dataclass(frozen=True, eq=False)
class _Stored:
    """An array of flaxckpt's own format that can be read by itself."""

    source: Source
    name: str
    stored: StoredArray
    options: Options

    @property
    def dtype(self) -> str:
        """The name of its dtype."""
        return self.stored.dtype

    @property
    def shape(self) -> Shape:
        """Its shape."""
        return self.stored.shape

    @property
    def chunks(self) -> Shape:
        """Its chunks."""
        return self.stored.chunks

    @property
    def sharding(self) -> Any:
        """How it was sharded."""
        return self.stored.sharding

    def read(self, regions: Sequence[Region]) -> Sequence[np.ndarray]:
        """The elements of each of `regions`."""
        wanted = list(dict.fromkeys(regions))
        reads = [ArrayRead(self.name, self.stored, wanted)]
        ((parts,),) = list(read_source(self.source, reads, self.options.buffer_bytes))
        return [parts[region] for region in regions]


def _region(index: Any, shape: Shape) -> tuple[Region, tuple[Any, ...]]:
    """What has to be read for `index` of an array of `shape`, and the index of that.

    Raises:
      IndexError: when it does not fit the shape.
    """
    keys = list(index) if isinstance(index, tuple) else [index]
    dots = [i for i, key in enumerate(keys) if key is ...]
    rest = [slice(None)] * (len(shape) - len(keys) + len(dots))
    if len(dots) > 1 or len(keys) - len(dots) > len(shape):
        raise IndexError(f"the index {index!r} does not fit the shape {shape}")
    place = dots[0] if dots else len(keys)
    keys[place : place + 1] = rest
    axes = [_axis(key, length) for key, length in zip(keys, shape, strict=True)]
    region = Region(tuple(axis[0] for axis in axes), tuple(axis[1] for axis in axes))
    # As with numpy, what was indexed with ... is an array, if only one of no axes.
    return region, (*(axis[2] for axis in axes), *[...] * len(dots))


def _axis(key: Any, length: int) -> tuple[int, int, Any]:
    """Where what `key` takes of an axis begins, how long it is, and the index of that."""
    if not isinstance(key, slice | int | np.integer) or isinstance(key, bool):
        raise IndexError(f"the index {key!r} is none of integers, slices and ...")
    if not isinstance(key, slice):
        return range(length)[int(key)], 1, 0
    taken = range(length)[key]
    if not taken:
        return 0, 0, slice(None)
    first, last = sorted((taken[0], taken[-1]))
    return first, last - first + 1, slice(None, None, taken.step)
