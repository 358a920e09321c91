"""The arrays of an `.npz` file, each read when it is needed."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import math
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from flaxckpt.formats import files
from flaxckpt.formats.json_files import damaged
from flaxckpt.leaves.dtypes import dtype_name
from flaxckpt.sharding.chunks import Region, Shape
from flaxckpt.storage.location import Location

_NPY = ".npy"
# No array that deflate has packed is larger by more.
_MAX_RATIO = 1100
# numpy has no name for bfloat16, and writes its bytes.
_VOID_BFLOAT16 = np.dtype("V2")
_DAMAGE = (zipfile.BadZipFile, zlib.error, ValueError, EOFError, NotImplementedError, RuntimeError)


@dataclasses.dataclass(frozen=True, eq=False)
class NpzArray:
    """One array of an `.npz` file; a `LazyArray`."""

    file: Location
    archive: zipfile.ZipFile
    member: str
    dtype: str
    shape: Shape

    @property
    def chunks(self) -> Shape:
        """All of it: it may be compressed."""
        return self.shape

    @property
    def sharding(self) -> Any:
        """Nobody knows."""
        return None

    def read(self, regions: Sequence[Region]) -> Sequence[np.ndarray]:
        """Views of it.

        Raises:
          CorruptCheckpointError: when it is damaged.
        """
        with _explained(self.file), self.archive.open(self.member) as stream:
            values = np.lib.format.read_array(stream, allow_pickle=False)
        values = _with_bfloat16(values)
        return [values[region.slices] for region in regions]


def open_npz(file: Location) -> dict[str, NpzArray]:
    """The arrays of `file`, by name, of which only the headers were read.

    Raises:
      FileNotFoundError: when there is none.
      CorruptCheckpointError: when it is damaged, or holds Python objects.
    """
    source = file if isinstance(file, Path) else io.BytesIO(files.read(file))
    with _explained(file):
        archive = zipfile.ZipFile(source)
        members = [info for info in archive.infolist() if info.filename.endswith(_NPY)]
        arrays = [_open(file, archive, info) for info in members]
    return {array.member.removesuffix(_NPY): array for array in arrays}


@contextlib.contextmanager
def _explained(file: Location) -> Iterator[None]:
    """Turns what is raised where `file` is damaged into the error that says so."""
    try:
        yield
    except _DAMAGE as error:
        raise damaged(file, " ".join(str(error).split())) from None
    except OSError as error:
        if error.errno != errno.EINVAL:  # a seek to before the start
            raise
        raise damaged(file, "an offset in it is negative") from None


def _open(file: Location, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NpzArray:
    """The array in one file of `archive`."""
    with archive.open(info) as stream:
        shape, dtype = _header(stream)
    name = dtype_name(np.dtype(ml_dtypes.bfloat16) if dtype == _VOID_BFLOAT16 else dtype)
    if name is None:
        raise ValueError(f"{info.filename} has the dtype {dtype}")
    size = math.prod(shape) * dtype.itemsize
    if not size <= info.file_size <= info.compress_size * _MAX_RATIO:
        raise ValueError(f"{info.filename} does not have the {size} bytes of its shape")
    return NpzArray(file, archive, info.filename, name, shape)


def _header(stream: Any) -> tuple[Shape, np.dtype]:
    """The shape and the dtype of an array."""
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    else:
        shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
    return shape, dtype


def _with_bfloat16(values: np.ndarray) -> np.ndarray:
    """`values`, of which two bytes without a type are a bfloat16."""
    return values.view(ml_dtypes.bfloat16) if values.dtype == _VOID_BFLOAT16 else values
