"""JSON files with a checksum."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import crc32c
import orjson

from flaxckpt.errors import CorruptCheckpointError, StoreError, UnsupportedFormatError
from flaxckpt.store.layout import FORMAT_VERSION
from flaxckpt.store.store import Location

# JSON objects that carry their own checksum, where every other reader of them still parses.
#
# The innermost object at the end of the text gets one more, last member:
#
#     {..., "flaxckpt": {..., "crc32c": "89abcdef"}}
#
# The CRC-32C is over all bytes before `,"crc32c"`. What follows the checksum is only the closing
# braces, so no byte goes unchecked.


_SEAL = re.compile(rb',"crc32c":"([0-9a-f]{8})"(\}+)\Z')


def seal(data: dict[str, Any]) -> bytes:
    """`data` as JSON with its checksum; its last member must be a non-empty object.

    NaN and infinities must have been made strings before: JSON has none.
    """
    text = orjson.dumps(data)
    body = text.rstrip(b"}")
    return body + b',"crc32c":"%08x"' % crc32c.crc32c(body) + text[len(body) :]


def is_sealed(text: bytes) -> bool:
    """Whether `text` ends as `seal` ends it, intact or not."""
    return _SEAL.search(text) is not None


def unseal(text: bytes, path: str) -> dict[str, Any]:
    """The object that `seal` wrote.

    Raises:
      CorruptCheckpointError: when it is not intact; `path` is named.
    """
    found = _SEAL.search(text)
    if not found:
        raise CorruptCheckpointError(
            f"{path} is damaged: it does not end in a checksum ({len(text)} bytes). "
            "Restore another step."
        )
    computed = crc32c.crc32c(text[: found.start()])
    if computed != int(found[1], 16):
        raise CorruptCheckpointError(
            f"{path} is damaged: its checksum is {computed:08x}, stored is {found[1].decode()}. "
            "Restore another step."
        )
    try:
        data = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise CorruptCheckpointError(
            f"{path} is not JSON: {error}. Restore another step."
        ) from None
    if not isinstance(data, dict):
        raise CorruptCheckpointError(f"{path} holds no JSON object. Restore another step.")
    return data


# What all files of metadata have in common: the limits of what they may claim, and their version.
#
# A command that only lists a run reads nothing but this and `_CHECKPOINT_METADATA`, so nothing here
# needs numpy or TensorStore.


# A checkpoint is data, and not trusted. The numbers are far above every real state, and low enough
# that damaged or hostile metadata cost the reader neither memory nor time.
MAX_JSON_BYTES = 1 << 30
MAX_LEAVES = 2_000_000
MAX_DEPTH = 500
MAX_AXES = 64
# numpy cannot address more, whatever the dtype.
MAX_ELEMENTS = 1 << 48


class SavedFile(NamedTuple):
    """A file beside the metadata: its size in bytes, and its CRC-32C where it is not the data's."""

    size: int
    crc32c: int | None


def read_json_file(path: Location) -> bytes:
    """The bytes of a JSON file, which must be a file and no link to one.

    Raises:
      FileNotFoundError: when there is none.
      CorruptCheckpointError: when it is something else, or larger than any that flaxckpt writes.
    """
    try:
        return path.store.read_own(path, MAX_JSON_BYTES)
    except (FileNotFoundError, StoreError):
        raise
    except OSError as error:
        raise CorruptCheckpointError(
            f"{path} cannot be read: {error}. Restore another step."
        ) from None


def check_format(data: Any, path: str) -> None:
    """Refuses the JSON of a format that this version does not know.

    Raises:
      UnsupportedFormatError: when it is newer.
      CorruptCheckpointError: when it has no version; `path` is named.
    """
    version = data.get("format") if isinstance(data, dict) else None
    if type(version) is not int or version < 1:
        raise CorruptCheckpointError(f"{path} names no format version. Restore another step.")
    if version > FORMAT_VERSION:
        raise UnsupportedFormatError(
            f"{path} is of format {version}; this flaxckpt reads formats up to {FORMAT_VERSION}. "
            "Update flaxckpt."
        )
