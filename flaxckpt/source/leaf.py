"""A leaf of a checkpoint that can be read. Its type is known without numpy's or jax's values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from flaxckpt.leaves.dtypes import parse_dtype
from flaxckpt.leaves.lazy_array import LazyArray, in_memory, nbytes_of
from flaxckpt.leaves.spec import LeafSpec
from flaxckpt.sharding.chunks import Region, Shape

# jax, and the handlers of the leaf kinds, which need it, are imported where a value is made: who
# only looks at names and types does without.
if TYPE_CHECKING:
    from jax.sharding import NamedSharding


class Leaf:
    """A leaf of a checkpoint, or one that a transform makes. Nothing is read before `read`."""

    __slots__ = ("_array", "_guard", "_make", "_spec", "_value", "is_initial", "name", "origin")

    def __init__(
        self,
        name: str,
        spec: LeafSpec,
        array: LazyArray | None = None,
        value: Any = None,
        *,
        origin: str | None = None,
        guard: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ):
        """The leaf at the key path `name`, with an array, or a value as its handler encodes it.

        The `origin` is the key path that it was saved at; `None` for a leaf that a transform made.
        The array is read within `guard()`, which explains errors.
        """
        self.name, self.origin, self.is_initial = name, origin, False
        self._spec, self._array, self._value = spec, array, value
        self._guard = guard
        self._make: Callable[[], Leaf] | None = None

    @classmethod
    def computed(
        cls,
        name: str,
        make: Callable[[], Leaf],
        *,
        origin: str | None = None,
        is_initial: bool = False,
    ) -> Leaf:
        """The leaf at the key path `name`, with the contents of the leaf that `make` returns.

        `make` is called once the type or the value is needed. A leaf that `is_initial` stands for
        the value that the target has, or is initialised with.
        """
        leaf = cls(name, LeafSpec(""), origin=origin)
        leaf._make, leaf.is_initial = make, is_initial
        return leaf

    def renamed(self, name: str) -> Leaf:
        """The same leaf at another key path."""
        if self._make is not None:
            return Leaf.computed(name, self._known, origin=self.origin, is_initial=self.is_initial)
        leaf = Leaf(
            name, self._spec, self._array, self._value, origin=self.origin, guard=self._guard
        )
        leaf.is_initial = self.is_initial
        return leaf

    def __repr__(self) -> str:
        """Its name, and its type if that is known."""
        return f"Leaf({self.name}: {self.spec if self._make is None else 'to be computed'})"

    def _known(self) -> Leaf:
        """This leaf, with its type and contents."""
        if self._make is not None:
            made = self._make()._known()
            self._spec, self._array, self._value = made._spec, made._array, made._value
            self._guard, self._make = made._guard, None
        return self

    @property
    def spec(self) -> LeafSpec:
        """Its type."""
        return self._spec if self._make is None else self._known()._spec

    @property
    def array(self) -> LazyArray | None:
        """Its array, if it has one."""
        return self._array if self._make is None else self._known()._array

    @property
    def value(self) -> Any:
        """Otherwise its value, as it is stored."""
        return self._value if self._make is None else self._known()._value

    @property
    def shape(self) -> Shape:
        """The shape of an array; `()` for other leaves."""
        return self.spec.shape

    @property
    def dtype(self) -> np.dtype | None:
        """The dtype of an array or a numpy scalar; `None` for other leaves."""
        return parse_dtype(self.spec.dtype) if self.spec.dtype else None

    @property
    def nbytes(self) -> int:
        """The size of its array, in bytes."""
        array = self.array
        return 0 if array is None else nbytes_of(array)

    @property
    def sharding(self) -> NamedSharding | None:
        """How it was sharded when it was saved, on a mesh without devices; `None` if it was not."""
        found = None if self.array is None else self.array.sharding
        if found is None:
            return None
        from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

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
        from flaxckpt.leaves import kinds

        spec = self.spec
        region, rest = _region(index, spec.shape)
        if self.array is None:
            return kinds.decode(spec, self.value, self.name)
        words = self.array.shape[len(spec.shape) :]  # of a PRNG key; other leaves have none
        whole = Region((*region.start, *(0 for _ in words)), (*region.shape, *words))
        with self._guard():
            (values,) = self.array.read([whole])
        if spec.kind not in ("jax", "numpy", "prng_key"):
            return kinds.decode(spec, values, self.name)
        if spec.kind == "prng_key":
            from jax import numpy as jnp

            values = kinds.decode(spec, jnp.asarray(values), self.name)
        return values[rest]


def array_leaf(array: LazyArray, kind: str = "numpy") -> Leaf:
    """The leaf, without a name yet, of an array in a format that says nothing else about it."""
    return Leaf("", LeafSpec(kind, array.dtype, array.shape), array)


def as_leaf(value: Any, name: str) -> Leaf:
    """`value` as the leaf `name`, whether it is a leaf already or a value.

    Raises:
      UnsupportedLeafError: when no checkpoint can hold it.
    """
    if isinstance(value, Leaf):
        return value.renamed(name)
    import jax

    from flaxckpt.leaves import kinds

    spec, stored = kinds.encode(value, name)
    if isinstance(stored, np.ndarray | jax.Array):
        return Leaf(name, spec, in_memory(np.asarray(stored)))
    return Leaf(name, spec, value=stored)


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
        raise IndexError(f"the index {key!r} is not an integer, a slice or ...")
    if not isinstance(key, slice):
        return range(length)[int(key)], 1, 0
    taken = range(length)[key]
    if not taken:
        return 0, 0, slice(None)
    first, last = sorted((taken[0], taken[-1]))
    return first, last - first + 1, slice(None, None, taken.step)
