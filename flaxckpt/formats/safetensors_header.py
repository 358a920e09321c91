"""The header of a safetensors file: what it says, checked, and writing one. No I/O.

8 bytes with the length of the header, little-endian; the header, JSON; then the data, in which the
tensors lie one after the other, in C order and little-endian.

    {"__metadata__": {str: str}, name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}

Offsets count from the start of the data, and leave no byte of it out.
https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from flaxckpt.errors import CorruptCheckpointError, UnsupportedLeafError
from flaxckpt.leaves.dtypes import parse_dtype
from flaxckpt.metadata.limits import MAX_AXES, MAX_ELEMENTS

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


class Entry(NamedTuple):
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


def length(prefix: bytes, path: str) -> int:
    """The length of the header of the file at `path` that begins with the 8 bytes `prefix`.

    Raises:
      CorruptCheckpointError: when no header is so long.
    """
    if prefix == b"version ":
        raise _damaged(path, "it is the pointer that Git LFS keeps in its place (git lfs pull)")
    found = int.from_bytes(prefix, "little")
    if len(prefix) < PREFIX or not 2 <= found <= MAX_BYTES:
        raise _damaged(path, f"its first 8 bytes are no length of a header ({prefix.hex()})")
    return found


def parse(header: bytes, path: str) -> list[Entry]:
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
    _check_metadata(data.pop(METADATA, {}), path)
    entries = [_entry(name, value, path) for name, value in data.items()]
    end = 0
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.end)):
        if entry.start != end:
            what = "leaves bytes out before it" if entry.start > end else "overlaps another one"
            raise _damaged(path, f"its tensor {entry.name!r} {what} (at byte {entry.start})")
        end = entry.end
    return entries


def build(
    tensors: Sequence[Entry], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[Entry]]:
    """All that comes before the data, and the tensors in their order and place: as the library.

    Example:
      >>> header, tensors = build([Entry("b", "int8", (3,)), Entry("a", "float32", (2,))])
      >>> [(t.name, t.start, t.end) for t in tensors], len(header) % 8
      ([('a', 0, 8), ('b', 8, 11)], 0)
    """
    placed, start = [], 0
    for entry in sorted(tensors, key=lambda entry: (-_RANKS[entry.dtype], entry.name)):
        placed.append(entry._replace(start=start))
        start = placed[-1].end
    data: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    data |= {entry.name: _to_json(entry) for entry in placed}
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
        raise _damaged(path, f"it is no valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise _damaged(path, "it holds no JSON object")
    for key in data:
        if any("\ud800" <= character <= "\udfff" for character in key):
            raise _damaged(path, f"the name {key!r} is not valid unicode")
    return data


def _entry(name: str, value: Any, path: str) -> Entry:
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
    entry = Entry(name, DTYPES[code], tuple(shape), start)
    if entry.end != end:
        needed = entry.end - start
        raise _damaged(path, f"its tensor {name!r} has {end - start} bytes, but needs {needed}")
    return entry


def _is_large(shape: Sequence[int]) -> bool:
    """Whether no array can have `shape`, even if one of its axes is empty."""
    return len(shape) > MAX_AXES or math.prod(max(1, n) for n in shape) > MAX_ELEMENTS


def _to_json(entry: Entry) -> Any:
    """What a header says of a tensor."""
    offsets = [entry.start, entry.end]
    return {"dtype": CODES[entry.dtype], "shape": entry.shape, "data_offsets": offsets}


def _check_metadata(metadata: Any, path: str) -> None:
    """Refuses metadata that are not strings by name."""
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _damaged(path, f"its {METADATA} are not strings")


def _damaged(path: str, why: str) -> CorruptCheckpointError:
    """The error of a file."""
    return CorruptCheckpointError(f"{path} is damaged: {why}. Get the file again.")
