"""What the values of arrays are like: smallest, largest, mean, norm, how many are no numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from flaxckpt.cli.work import blocks
from flaxckpt.leaves.dtypes import parse_dtype
from flaxckpt.restoring.source import SavedLeaf, Source


@dataclasses.dataclass
class Stats:
    """What is known of the values of a leaf so far.

    NaN and infinities are counted, and are in none of the others. Complex numbers have no order
    and so only a norm.
    """

    least: Any = None
    largest: Any = None
    nan: int = 0
    inf: int = 0
    is_complex: bool = False
    _finite: int = 0
    _sum: float = 0.0
    _squares: float = 0.0

    def add(self, values: np.ndarray) -> None:
        """Takes more values into account."""
        self.is_complex = values.dtype.kind == "c"
        if values.dtype.kind in "iu":
            finite = values
        else:
            values = values.astype(np.complex128 if self.is_complex else np.float64, copy=False)
            finite = values[np.isfinite(values)]
            nan = int(np.isnan(values).sum())
            self.nan += nan
            self.inf += values.size - finite.size - nan
        if finite.size:
            self._add(finite)

    def _add(self, values: np.ndarray) -> None:
        """Takes more finite values into account."""
        sizes = np.abs(values) if self.is_complex else values.astype(np.float64, copy=False)
        with np.errstate(over="ignore"):
            self._squares += float(np.sum(np.square(sizes)))
        self._finite += values.size
        if self.is_complex:
            return
        least, largest = values.min().item(), values.max().item()
        self.least = least if self.least is None else min(self.least, least)
        self.largest = largest if self.largest is None else max(self.largest, largest)
        self._sum += float(np.sum(sizes))

    @property
    def mean(self) -> float | None:
        """The mean of the finite values."""
        return self._sum / self._finite if self._finite and not self.is_complex else None

    @property
    def norm(self) -> float:
        """The square root of the sum of the squares of the finite values."""
        return math.sqrt(self._squares)

    def document(self) -> dict[str, Any]:
        """All of it, for programs."""
        return {
            "min": self.least,
            "max": self.largest,
            "mean": self.mean,
            "norm": self.norm,
            "nan": self.nan,
            "inf": self.inf,
        }


def stats_of(source: Source, leaves: Sequence[SavedLeaf]) -> dict[str, Stats]:
    """What the values of `leaves` are like, by name; of those that are numbers.

    Raises:
      CorruptCheckpointError: when something is missing or damaged; the leaf is named.
    """
    found: dict[str, Stats] = {}
    with source.unchanged():
        for block in blocks.read(source, blocks.wanted(filter(_is_number, leaves))):
            values = block.values
            found.setdefault(block.leaf.name, Stats()).add(_widened(values))
    return found


def _is_number(leaf: SavedLeaf) -> bool:
    """Whether a leaf is numbers; the words of a random key are none."""
    is_key = leaf.spec.kind == "prng_key"
    return not is_key and leaf.array is not None and blocks.is_number(parse_dtype(leaf.array.dtype))


def _widened(values: np.ndarray) -> np.ndarray:
    """Integers of ml_dtypes as integers of numpy, which knows the smallest of them."""
    if values.dtype.kind == "V" and "int" in values.dtype.name:
        return values.astype(np.int64)
    return values
