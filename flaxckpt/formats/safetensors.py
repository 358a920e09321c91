"""safetensors: one file, or several with an index (`*.safetensors.index.json`).

The tree is flat: the names are those in the file, and which library's arrays they were is not
known. Of several files, only the tensors that the index lists are read.
"""

from __future__ import annotations

import concurrent.futures
from pathlib import Path

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.formats import files, safetensors_header
from flaxckpt.formats.safetensors_header import MAX_BYTES, PREFIX, Entry
from flaxckpt.formats.safetensors_tensor import Tensor, read_bytes
from flaxckpt.leaves.lazy import LazyLeaf
from flaxckpt.leaves.record import LeafSpec
from flaxckpt.storage.location import Location

NAME = "safetensors"
LOOKS_FOR = (
    "a file *.safetensors or *.safetensors.index.json, or a directory with model.safetensors or "
    "one such index"
)

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
MODEL = "model"

# How many headers are read at a time: a bucket takes its time to answer.
THREADS = 16


def detect(path: Location) -> bool:
    """Whether `path` is a file of the format, an index, or a directory with what is plainly one."""
    if path.name.endswith((SUFFIX, INDEX_SUFFIX)) and files.is_file(path):
        return True  # what is wrong with such a file is for `read` to say
    return _has_header(path) or _within(path) is not None


def read(path: Location) -> dict[str, LazyLeaf]:
    """The tensors by name, in the order of the header or of the index.

    Raises:
      CorruptCheckpointError: when a file is damaged or not what the format says.
      UnsupportedLeafError: when the values of a tensor have less than a byte each.
    """
    file = _within(path) or path
    return _read_index(file) if file.name.endswith(INDEX_SUFFIX) else _read_file(file)


def _has_header(path: Location) -> bool:
    """Whether there is a file that begins as one of the format does, whatever its name."""
    if isinstance(path, Path) and not path.is_file():
        return False
    try:
        start = files.read_range(path, 0, PREFIX + 1)
    except (FileNotFoundError, ValueError):  # a bucket has no such object, or a shorter one
        return False
    found = int.from_bytes(start[:PREFIX], "little")
    return start[PREFIX:] == b"{" and found <= MAX_BYTES


def _within(path: Location) -> Location | None:
    """The file to read of a directory; `None` when it is none, or there are several to choose."""
    names = files.children(path)
    if (single := MODEL + SUFFIX) in names:
        return path / single
    indices = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if (usual := MODEL + INDEX_SUFFIX) in indices:
        return path / usual
    return path / indices[0] if len(indices) == 1 else None


def _read_index(index: Location) -> dict[str, LazyLeaf]:
    """The tensors that an index lists."""
    where = read_weight_map(index)
    names = list(dict.fromkeys(where.values()))
    with concurrent.futures.ThreadPoolExecutor(THREADS, "flaxckpt-headers") as pool:
        read = pool.map(_read_file, [index.parent / name for name in names])
        found = dict(zip(names, read, strict=True))
    for name, file in where.items():
        if name not in found[file]:
            raise CorruptCheckpointError(
                f"{index} says that the tensor {name!r} is in {file}, which has none of that "
                "name. Get the files again."
            )
    return {name: found[file][name] for name, file in where.items()}


def read_weight_map(index: Location) -> dict[str, str]:
    """The name of the file, which is next to `index`, of each tensor.

    Raises:
      CorruptCheckpointError: when there is none, or it leads elsewhere.
    """
    data = safetensors_header.load_object(files.read(index), str(index))
    where = data.get("weight_map")
    if not isinstance(where, dict):
        raise CorruptCheckpointError(f"{index} has no weight_map. Get the file again.")
    for name, file in where.items():
        if not isinstance(file, str) or not file.endswith(SUFFIX) or set(file) & set("/\\\0"):
            raise CorruptCheckpointError(
                f"{index} says that the tensor {name!r} is in {file!r}, which is not the name of "
                f"a *{SUFFIX} file next to it. Get the file again."
            )
    return where


def _read_file(path: Location) -> dict[str, LazyLeaf]:
    """The tensors of one file."""
    length = safetensors_header.length(read_bytes(path, 0, PREFIX), str(path))
    start = PREFIX + length
    if isinstance(path, Path) and path.stat().st_size < start:
        raise CorruptCheckpointError(f"{path} ends within its header. Get the file again.")
    entries = safetensors_header.parse(read_bytes(path, PREFIX, start), str(path))
    _check_end(path, start + max((entry.end for entry in entries), default=0))
    return {entry.name: _leaf(path, start, entry) for entry in entries}


def _check_end(path: Location, end: int) -> None:
    """Refuses a file that does not end at `end`; an object need only have so many bytes."""
    if isinstance(path, Path):
        if (size := path.stat().st_size) != end:
            raise CorruptCheckpointError(
                f"{path} has {size} bytes, but its header tells of {end}. Get the file again."
            )
    else:  # which has no size that could be asked for
        read_bytes(path, end - 1, end)


def _leaf(path: Location, data: int, entry: Entry) -> LazyLeaf:
    """The tensor `entry` of a file whose data begin at `data`."""
    array = Tensor(path, entry.name, entry.dtype, entry.shape, data + entry.start)
    return LazyLeaf(LeafSpec("numpy", entry.dtype, entry.shape), array)
