"""JSON objects that carry their own checksum, where every other reader of them still parses.

The innermost object at the end of the text gets one more, last member:

    {..., "flaxckpt": {..., "crc32c": "89abcdef"}}

The CRC-32C is over all bytes before `,"crc32c"`. What follows the checksum is only the closing
braces, so no byte goes unchecked.
"""

from __future__ import annotations

import re
from typing import Any

import crc32c
import orjson

from flaxckpt.errors import CorruptCheckpointError

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
