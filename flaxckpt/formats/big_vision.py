"""big_vision's checkpoints, and npz files."""

from __future__ import annotations

import contextlib
import errno
import io
import math
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.formats.reading import damaged
from flaxckpt.formats.zarr import METADATA, array_names, nested, read_arrays
from flaxckpt.leaves.dtypes import dtype_name
from flaxckpt.leaves.lazy_array import DerivedArray
from flaxckpt.sharding.chunks import Region, Shape
from flaxckpt.source.leaf import Leaf, array_leaf
from flaxckpt.store.store import Location

# Checkpoints that big_vision wrote: a zarr directory for each leaf, or one `.npz` file.
#
# All containers come back as dicts: the elements of lists, tuples and NamedTuples are '0', '1', ...


NAME = "big_vision"
LOOKS_FOR = (
    "a directory with zarr directories such as params~Dense_0~kernel, a name with a file of that "
    "name and -LAST beside it, or an .npz file"
)

_SEPARATOR, _LAST, _NPZ = "~", "-LAST", ".npz"
_ZIP = b"PK\x03\x04"
# `checkpoint.bv-000000010`, or `-tmp` after it for one that is not kept.
_SUFFIX = re.compile(r"\d{9}(-tmp)?")
_DIRECTORY = re.compile(rf".+-{_SUFFIX.pattern}")


def detect(path: Location) -> bool:
    """Whether `path` is a checkpoint of big_vision, or names the last of several."""
    if path.name.endswith(_NPZ):
        return _start(path, len(_ZIP)) == _ZIP
    return _is_directory(path) or bool(_start(path.parent / (path.name + _LAST), 1))


def _is_directory(path: Location) -> bool:
    """Whether `path` holds arrays by such names; one is looked into."""
    children = path.children()
    if _DIRECTORY.fullmatch(path.name) is None:
        children = [name for name in children if _SEPARATOR in name]
    return bool(children) and _start(path / children[0] / METADATA, 1) == b"{"


def _start(file: Location, length: int) -> bytes:
    """The first bytes of a file; none when there is no such file."""
    try:
        return file.read(0, length)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return b""


def read(path: Location) -> Any:
    """The tree: dicts over arrays.

    Raises:
      CorruptCheckpointError: when it is damaged.
    """
    if path.name.endswith(_NPZ):
        return nested(open_npz(path), "/", path)
    directory = path if _is_directory(path) else _last(path)
    names = array_names(directory)
    if not names:
        raise CorruptCheckpointError(
            f"the big_vision checkpoint at {directory} has no arrays. Restore another step."
        )
    return nested(read_arrays(directory, names), _SEPARATOR, directory)


def _last(path: Location) -> Location:
    """The checkpoint that is the last of those called `path`."""
    file = path.parent / (path.name + _LAST)
    suffix = file.read().decode("utf-8", "replace").strip()
    if _SUFFIX.fullmatch(suffix) is None:
        raise damaged(file, f"{suffix[:50]!r} is not the suffix of a checkpoint")
    return path.parent / f"{path.name}-{suffix}"


# The arrays of an `.npz` file, each read when it is needed.


_NPY = ".npy"
# No array that deflate has packed is larger by more.
_MAX_RATIO = 1100
# numpy has no name for bfloat16, and writes its bytes.
_VOID_BFLOAT16 = np.dtype("V2")
_DAMAGE = (zipfile.BadZipFile, zlib.error, ValueError, EOFError, NotImplementedError, RuntimeError)


def open_npz(file: Location) -> dict[str, Leaf]:
    """The arrays of `file`, by name, of which only the headers were read.

    Raises:
      FileNotFoundError: when there is none.
      CorruptCheckpointError: when it is damaged, or holds Python objects.
    """
    # To look for the end of it, where its directory is, its size must be known.
    source = file if file.store.can.sizes else io.BytesIO(file.read())
    with _explained(file):
        archive = zipfile.ZipFile(source)
        members = [info for info in archive.infolist() if info.filename.endswith(_NPY)]
        arrays = {info.filename: _open(file, archive, info) for info in members}
    return {name.removesuffix(_NPY): array_leaf(array) for name, array in arrays.items()}


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


def _open(file: Location, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> DerivedArray:
    """The array in one file of `archive`."""
    with archive.open(info) as stream:
        shape, dtype = _header(stream)
    name = dtype_name(np.dtype(ml_dtypes.bfloat16) if dtype == _VOID_BFLOAT16 else dtype)
    if name is None:
        raise ValueError(f"{info.filename} has the dtype {dtype}")
    size = math.prod(shape) * dtype.itemsize
    if not size <= info.file_size <= info.compress_size * _MAX_RATIO:
        raise ValueError(f"{info.filename} does not have the {size} bytes of its shape")

    def read(regions: Sequence[Region]) -> Sequence[np.ndarray]:
        with _explained(file), archive.open(info.filename) as stream:
            values = np.lib.format.read_array(stream, allow_pickle=False)
        if values.dtype == _VOID_BFLOAT16:
            values = values.view(ml_dtypes.bfloat16)
        return [values[region.slices] for region in regions]

    return DerivedArray(name, shape, shape, read)  # it may be compressed, so it is one chunk


def _header(stream: Any) -> tuple[Shape, np.dtype]:
    """The shape and the dtype of an array."""
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    else:
        shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
    return shape, dtype
