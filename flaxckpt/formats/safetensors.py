"""safetensors files."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from flaxckpt.errors import CorruptCheckpointError, UnsupportedLeafError
from flaxckpt.formats import reading
from flaxckpt.leaves.dtypes import parse_dtype
from flaxckpt.metadata.sealed_json import MAX_AXES, MAX_ELEMENTS
from flaxckpt.sharding.chunks import Region, Shape, chunk_region, chunks_of
from flaxckpt.source.leaf import Leaf, array_leaf
from flaxckpt.store.ocdbt import empty
from flaxckpt.store.store import Location

# safetensors: one file, or several with an index (`*.safetensors.index.json`).
#
# The tree is flat: the names are those in the file, and which library's arrays they were is not
# known. Of several files, only the tensors that the index lists are read.


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
    if path.name.endswith((SUFFIX, INDEX_SUFFIX)) and path.is_file():
        return True  # what is wrong with such a file is for `read` to say
    return _has_header(path) or _within(path) is not None


def read(path: Location) -> dict[str, Leaf]:
    """The tensors by name, in the order of the header or of the index.

    Raises:
      CorruptCheckpointError: when a file is damaged or not what the format says.
      UnsupportedLeafError: when the values of a tensor have less than a byte each.
    """
    file = _within(path) or path
    return _read_index(file) if file.name.endswith(INDEX_SUFFIX) else _read_file(file)


def _has_header(path: Location) -> bool:
    """Whether there is a file that begins as one of the format does, whatever its name."""
    if not path.is_file():
        return False
    start = path.read(0, PREFIX + 1)
    found = int.from_bytes(start[:PREFIX], "little")
    return start[PREFIX:] == b"{" and found <= MAX_BYTES


def _within(path: Location) -> Location | None:
    """The file to read of a directory; `None` when it is none, or there are several to choose."""
    names = path.children()
    if (single := MODEL + SUFFIX) in names:
        return path / single
    indices = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if (usual := MODEL + INDEX_SUFFIX) in indices:
        return path / usual
    return path / indices[0] if len(indices) == 1 else None


def _read_index(index: Location) -> dict[str, Leaf]:
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
    data = load_object(index.read(), str(index))
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


def _read_file(path: Location) -> dict[str, Leaf]:
    """The tensors of one file."""
    length = header_length(read_bytes(path, 0, PREFIX), str(path))
    start = PREFIX + length
    size = _size(path)
    if size is not None and size < start:
        raise CorruptCheckpointError(f"{path} ends within its header. Get the file again.")
    entries = parse(read_bytes(path, PREFIX, start), str(path))
    _check_end(path, start + max((entry.end for entry in entries), default=0))
    return {
        e.name: array_leaf(StoredTensor(path, e.name, e.dtype, e.shape, start + e.start))
        for e in entries
    }


def _check_end(path: Location, end: int) -> None:
    """Refuses a file that does not end at `end`; an object need only have so many bytes."""
    if (size := _size(path)) is None:
        read_bytes(path, end - 1, end)
    elif size != end:
        raise CorruptCheckpointError(
            f"{path} has {size} bytes, but its header tells of {end}. Get the file again."
        )


def _size(path: Location) -> int | None:
    """The size of a file; `None` where that is not known."""
    found = path.store.stat(path) if path.store.can.sizes else None
    return None if found is None else found.size


# The header of a safetensors file: what it says, checked, and writing one. No I/O.
#
# 8 bytes with the length of the header, little-endian; the header, JSON; then the data, in which
# the tensors lie one after the other, in C order and little-endian.
#
#     {"__metadata__": {str: str}, name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
#
# Offsets count from the start of the data, and leave no byte of it out.
# https://huggingface.co/docs/safetensors/index#format


METADATA = "__metadata__"
PREFIX = 8
# The library's own limit.
MAX_BYTES = 100_000_000

# What each dtype is called here, in the order of the library's own list: it writes the last first.
DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
CODES = {name: code for code, name in DTYPES.items()}
_RANKS = {name: rank for rank, name in enumerate(DTYPES.values())}
_PACKED = frozenset({"F4", "F6_E2M3", "F6_E3M2"})


class TensorEntry(NamedTuple):
    """One tensor of a file.

    Attributes:
      name: its name.
      dtype: the name of its dtype, as in `leaves.dtypes`.
      shape: its shape.
      start: where its bytes begin, from the start of the data.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def end(self) -> int:
        """Where its bytes end."""
        return self.start + math.prod(self.shape) * parse_dtype(self.dtype).itemsize


def header_length(prefix: bytes, path: str) -> int:
    """The length of the header of the file at `path` that begins with the 8 bytes `prefix`.

    Raises:
      CorruptCheckpointError: when no header is so long.
    """
    if prefix == b"version ":
        raise _damaged(path, "it is the pointer that Git LFS keeps in its place (git lfs pull)")
    found = int.from_bytes(prefix, "little")
    if len(prefix) < PREFIX or not 2 <= found <= MAX_BYTES:
        raise _damaged(path, f"its first 8 bytes are not the length of a header ({prefix.hex()})")
    return found


def parse(header: bytes, path: str) -> list[TensorEntry]:
    """The tensors of a file, in the order in which its header has them.

    Args:
      header: the JSON.
      path: the file, for errors.

    Raises:
      CorruptCheckpointError: when it is not what the format says; the tensor is named.
      UnsupportedLeafError: when the values of a tensor have less than a byte each.
    """
    if header[:1] != b"{":
        raise _damaged(path, f"its header begins with {header[:1]!r} and not with b'{{'")
    data = load_object(header, path)
    metadata = data.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _damaged(path, f"its {METADATA} are not strings")
    entries = [_entry(name, value, path) for name, value in data.items()]
    end = 0
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.end)):
        if entry.start != end:
            what = "leaves bytes out before it" if entry.start > end else "overlaps another one"
            raise _damaged(path, f"its tensor {entry.name!r} {what} (at byte {entry.start})")
        end = entry.end
    return entries


def build(
    tensors: Sequence[TensorEntry], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[TensorEntry]]:
    """All that comes before the data, and the tensors in their order and place: as the library.

    Example:
      >>> entries = [TensorEntry("b", "int8", (3,)), TensorEntry("a", "float32", (2,))]
      >>> header, tensors = build(entries)
      >>> [(t.name, t.start, t.end) for t in tensors], len(header) % 8
      ([('a', 0, 8), ('b', 8, 11)], 0)
    """
    placed, start = [], 0
    for entry in sorted(tensors, key=lambda entry: (-_RANKS[entry.dtype], entry.name)):
        placed.append(entry._replace(start=start))
        start = placed[-1].end
    data: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    for entry in placed:
        offsets = [entry.start, entry.end]
        code = CODES[entry.dtype]
        data[entry.name] = {"dtype": code, "shape": entry.shape, "data_offsets": offsets}
    text = orjson.dumps(data)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(PREFIX, "little") + text, placed


def load_object(text: bytes, path: str) -> dict[str, Any]:
    """The JSON object `text`, in which no key is there twice.

    Raises:
      CorruptCheckpointError: when it is none.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice, _ = collections.Counter(key for key, _ in pairs).most_common(1)[0]
            raise ValueError(f"{twice!r} is there twice")
        return found

    try:
        data = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"it is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise _damaged(path, "it holds no JSON object")
    for key in data:
        if not is_unicode(key):
            raise _damaged(path, f"the name {key!r} is not valid unicode")
    return data


def is_unicode(name: str) -> bool:
    """Whether a name has no half of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def _entry(name: str, value: Any, path: str) -> TensorEntry:
    """The tensor `name` that the header describes by `value`."""
    match value:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [start, end]}:
            pass
        case _:
            raise _damaged(path, f"its tensor {name!r} has no dtype, shape and data_offsets")
    if code in _PACKED:
        raise UnsupportedLeafError(
            f"the tensor {name} in {path} is of dtype {code}, whose values have less than a byte "
            "each. Convert it to another dtype with the library that wrote it."
        )
    if code not in DTYPES:
        raise _damaged(path, f"its tensor {name!r} is of the dtype {code!r}, which is not known")
    if not all(type(n) is int and n >= 0 for n in (*shape, start, end)) or _is_large(shape):
        raise _damaged(
            path, f"its tensor {name!r} has an impossible shape or place: {value!s:.200}"
        )
    entry = TensorEntry(name, DTYPES[code], tuple(shape), start)
    if entry.end != end:
        needed = entry.end - start
        raise _damaged(path, f"its tensor {name!r} has {end - start} bytes, but needs {needed}")
    return entry


def _is_large(shape: Sequence[int]) -> bool:
    """Whether no array can have `shape`, even if one of its axes is empty."""
    return len(shape) > MAX_AXES or math.prod(max(1, n) for n in shape) > MAX_ELEMENTS


def _damaged(path: str, why: str) -> CorruptCheckpointError:
    """The error of a file."""
    return CorruptCheckpointError(f"{path} is damaged: {why}. Get the file again.")


# A tensor of a safetensors file, which is read in parts.


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
    found = path.read(start, end)
    if len(found) != end - start:
        raise CorruptCheckpointError(f"{path} ends before byte {end}. Get the file again.")
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class StoredTensor:
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
        return reading.leading_rows(self.shape, parse_dtype(self.dtype).itemsize, CHUNK_BYTES)

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
        gap = BUCKET_GAP_BYTES if self.path.store.can.latency else GAP_BYTES
        needed = (run for p in parts for run in reading.runs(p, self.shape, dtype.itemsize, gap))
        (base, _), *_ = reading.runs(
            chunk._replace(shape=(1,) * len(self.shape)), self.shape, dtype.itemsize
        )
        memory = np.empty(math.prod(chunk.shape) * dtype.itemsize, np.uint8)
        for start, end in reading.joined(needed, gap):
            data = read_bytes(self.path, self.start + start, self.start + end)
            found = np.frombuffer(data, np.uint8)
            if found.size == memory.size:  # most are needed whole
                return found.view(dtype).reshape(chunk.shape)
            memory[start - base : end - base] = found
        return memory.view(dtype).reshape(chunk.shape)
