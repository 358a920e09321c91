"""A tensor of a safetensors file, which is read in parts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.formats import files, row_major
from flaxckpt.leaves.dtypes import parse_dtype
from flaxckpt.sharding.chunks import Region, Shape, chunk_region, chunks_of
from flaxckpt.storage.buffers import empty
from flaxckpt.storage.location import Location

# What is read at once.
CHUNK_BYTES = 8 << 20
# What is read although nobody wants it, because another request would take longer.
GAP_BYTES, BUCKET_GAP_BYTES = 1 << 16, 1 << 20


def read_bytes(path: Location, start: int, end: int) -> bytes:
    """The bytes of a file from `start` to `end`.

    Raises:
      FileNotFoundError: when there is none.
      CorruptCheckpointError: when it has not so many.
    """
    try:
        found = files.read_range(path, start, end)
    except ValueError as error:  # of a bucket
        raise CorruptCheckpointError(
            f"{path} cannot be read: {error}. Get the file again."
        ) from None
    if len(found) != end - start:
        raise CorruptCheckpointError(f"{path} ends before byte {end}. Get the file again.")
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor of a file; a `LazyArray`.

    Attributes:
      path: the file.
      name: its name in it.
      dtype: the name of its dtype.
      shape: its shape.
      start: where its bytes begin in the file.
    """

    path: Location
    name: str
    dtype: str
    shape: Shape
    start: int

    @property
    def chunks(self) -> Shape:
        """Rows of the first axes, which are one piece of the file."""
        return row_major.leading_rows(self.shape, parse_dtype(self.dtype).itemsize, CHUNK_BYTES)

    @property
    def sharding(self) -> Any:
        """It does not say."""
        return None

    def read(self, regions: Sequence[Region]) -> Sequence[np.ndarray]:
        """The elements of each of `regions`; what is near in the file is read once for all."""
        dtype = parse_dtype(self.dtype)
        # The bytes of a bool may be anything in a file, but not in numpy.
        stored = np.dtype(np.uint8) if dtype == np.bool_ else dtype
        memory = [empty(region.shape, stored) for region in regions]
        for grid, parts in self._by_chunk(regions).items():
            chunk = chunk_region(grid, self.chunks)
            elements = self._read_chunk(chunk, [part for _, part in parts], stored)
            for i, part in parts:
                memory[i][part.within(regions[i])] = elements[part.within(chunk)]
        return memory if stored == dtype else [values != 0 for values in memory]

    def _by_chunk(self, regions: Sequence[Region]) -> dict[Shape, list[tuple[int, Region]]]:
        """What is needed of each chunk, and of which of `regions` it is."""
        found: dict[Shape, list[tuple[int, Region]]] = {}
        for i, region in enumerate(regions):
            for grid, part in chunks_of(region, self.chunks):
                found.setdefault(grid, []).append((i, part))
        return found

    def _read_chunk(self, chunk: Region, parts: Sequence[Region], dtype: np.dtype) -> np.ndarray:
        """A chunk in which what is not in `parts` may be anything."""
        gap = GAP_BYTES if isinstance(self.path, Path) else BUCKET_GAP_BYTES
        needed = (run for p in parts for run in row_major.runs(p, self.shape, dtype.itemsize, gap))
        (base, _), *_ = row_major.runs(
            chunk._replace(shape=(1,) * len(self.shape)), self.shape, dtype.itemsize
        )
        memory = np.empty(math.prod(chunk.shape) * dtype.itemsize, np.uint8)
        for start, end in row_major.joined(needed, gap):
            data = read_bytes(self.path, self.start + start, self.start + end)
            found = np.frombuffer(data, np.uint8)
            if found.size == memory.size:  # most are needed whole
                return found.view(dtype).reshape(chunk.shape)
            memory[start - base : end - base] = found
        return memory.view(dtype).reshape(chunk.shape)
