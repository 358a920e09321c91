"""How much each part of the state changed from one step to the next, with bounded memory."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from flaxckpt.leaves.dtypes import is_floating
from flaxckpt.reporting.subtrees import fitting_depth, prefix
from flaxckpt.sharding.chunks import Region, Shape, chunks_of, whole

# Rows of the picture: more cannot be read.
MOST_ROWS = 24
# So many elements are computed with at once, as float64.
_PIECE = 1 << 20


class Part(Protocol):
    """A leaf that is read in parts; `flaxckpt.Leaf` is one."""

    @property
    def spec(self) -> Any:
        """Its type."""

    @property
    def array(self) -> Any:
        """Its array; `None` when it has none."""

    @property
    def nbytes(self) -> int:
        """The size of its array."""

    def read(self, index: Any = ...) -> Any:
        """What is at `index`."""


Checkpoint = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Changes:
    """The relative L2 norm of what changed.

    Attributes:
      pairs: the pairs of steps, in order.
      names: the subtrees; the empty name is the whole state.
      values: of each subtree, for each pair: |new - old| / |old|. 0 means that no bit of a value
        changed, infinity that everything was 0 before, NaN that there is nothing to compare, or
        that there are values which are not finite.
      uncompared: how many floating arrays are not in all steps with the same shape.
    """

    pairs: Sequence[tuple[int, int]]
    names: Sequence[str]
    values: Sequence[Sequence[float]]
    uncompared: int = 0


def floating(checkpoint: Checkpoint) -> dict[str, Part]:
    """The arrays of floating-point numbers of a checkpoint."""
    leaves: Iterator[tuple[str, Part]] = ((name, checkpoint[name]) for name in checkpoint)
    return {name: leaf for name, leaf in leaves if _is_floating(leaf)}


def _is_floating(leaf: Part) -> bool:
    """Whether it is an array of floating-point numbers."""
    is_array = leaf.array is not None and leaf.spec.kind in ("jax", "numpy")
    return is_array and is_floating(leaf.array.dtype)


def bytes_to_read(checkpoints: Mapping[int, Checkpoint]) -> int:
    """How many bytes `changes` reads of them."""
    every = (floating(checkpoint).values() for checkpoint in checkpoints.values())
    return sum(leaf.nbytes for leaves in every for leaf in leaves)


def changes(
    checkpoints: Mapping[int, Checkpoint],
    *,
    most_rows: int = MOST_ROWS,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Changes:
    """The changes between neighbours of `checkpoints`.

    Each array is read once from each step, a chunk at a time: two chunks are in memory.

    Args:
      checkpoints: by step, in order.
      most_rows: how many subtrees there may be, beside the whole state.
      progress: is given the bytes that were read, as they are.
    """
    steps = list(checkpoints)
    leaves = [floating(checkpoint) for checkpoint in checkpoints.values()]
    names = list(dict.fromkeys(name for step in reversed(leaves) for name in step))
    depth = fitting_depth(names, most_rows)
    sums: dict[str, np.ndarray] = {}
    for name in names:
        versions = [step.get(name) for step in leaves]
        found = _squares(versions)
        progress(sum(leaf.nbytes for leaf in versions if leaf is not None))
        for row in dict.fromkeys(("", prefix(name, depth))):
            sums[row] = sums.get(row, 0) + found
    values = [[_ratio(*pair) for pair in row] for row in sums.values()]
    uncompared = sum(not _is_in_all([step.get(name) for step in leaves]) for name in names)
    pairs = list(itertools.pairwise(steps))
    return Changes(pairs, list(sums), values, uncompared)


def _is_in_all(versions: Sequence[Part | None]) -> bool:
    """Whether every step has it, with the same shape."""
    return len({None if leaf is None else leaf.spec.shape for leaf in versions} - {None}) == 1 and (
        None not in versions
    )


def _squares(versions: Sequence[Part | None]) -> np.ndarray:
    """For each pair of versions of a leaf: the squares of the change, of the old values, and how
    many elements were compared.
    """
    sums = np.zeros((max(0, len(versions) - 1), 3))
    newest = next(leaf for leaf in reversed(versions) if leaf is not None)
    shape: Shape = newest.spec.shape
    fits = [leaf if leaf is not None and leaf.spec.shape == shape else None for leaf in versions]
    for _, region in chunks_of(whole(shape), newest.array.chunks):
        old = None
        for pair, leaf in enumerate(fits, start=-1):
            new = None if leaf is None else _flat(leaf, region)
            if old is not None and new is not None:
                sums[pair] += _difference(old, new)
            old = new
    return sums


def _flat(leaf: Part, region: Region) -> np.ndarray:
    """The values of a part of a leaf."""
    return np.asarray(leaf.read(region.slices)).reshape(-1)


def _difference(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """As a row of `_squares`."""
    change = size = 0.0
    with np.errstate(invalid="ignore", over="ignore"):  # infinities come out as NaN
        for i in range(0, len(old), _PIECE):
            before, after = (values[i : i + _PIECE].astype(np.float64) for values in (old, new))
            size += float(before @ before)
            after -= before
            change += float(after @ after)
    return np.array([change, size, len(old)])


def _ratio(change: float, size: float, count: float) -> float:
    """The relative change of a row of `_squares`."""
    if not count or not math.isfinite(change) or not math.isfinite(size):
        return math.nan
    if not change:
        return 0.0
    return math.sqrt(change / size) if size else math.inf
