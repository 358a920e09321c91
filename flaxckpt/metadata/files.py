"""What all files of metadata have in common: how large they may be, and the version they name.

Whoever only lists a run reads no more than this and `_CHECKPOINT_METADATA`, so nothing here needs
numpy or TensorStore.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from flaxckpt.errors import CorruptCheckpointError, StoreError, UnsupportedFormatError
from flaxckpt.storage.layout import FORMAT_VERSION
from flaxckpt.storage.location import Location, read_file

MAX_JSON_BYTES = 1 << 30


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
        return read_file(path, MAX_JSON_BYTES)
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
