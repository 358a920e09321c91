"""Arrays as the zarr v3 core specification has them: metadata, chunk keys, and encoded chunks.

Codecs are `bytes` (little-endian) and `crc32c`: a chunk is its elements in C order, followed by
their CRC-32C as four little-endian bytes. Orbax, TensorStore and every other reader of zarr
verifies that checksum. https://zarr-specs.readthedocs.io/en/latest/v3/codecs/crc32c/index.html
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import crc32c
import numpy as np
import orjson

from flaxckpt.leaves.dtypes import Storage
from flaxckpt.sharding.chunks import Region, Shape

CHECKSUM_BYTES = 4

Bytes = bytes | bytearray | memoryview

_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]


class ChunkError(ValueError):
    """An encoded chunk is of the wrong size or does not match its checksum."""


@functools.lru_cache(maxsize=4096)
def array_metadata(shape: Shape, chunk: Shape, data_type: str) -> bytes:
    """The `zarr.json` of an array."""
    fill: object = [0.0, 0.0] if data_type.startswith("complex") else 0
    if data_type == "bool":
        fill = False
    elif "float" in data_type:
        fill = 0.0
    return orjson.dumps(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": shape,
            "data_type": data_type,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "chunk_key_encoding": {"name": "default"},
            "fill_value": fill,
            "codecs": _CODECS,
        }
    )


def metadata_key(store: str) -> str:
    """Where the metadata of the array `store` lies."""
    return f"{store}/zarr.json" if store else "zarr.json"


def chunk_key(store: str, grid: Shape) -> str:
    """Where the chunk at `grid` of the array `store` lies."""
    return "/".join([*([store] if store else []), "c", *map(str, grid)])


def chunk_count(shape: Shape, chunk: Shape) -> int:
    """How many chunks an array has; without elements it has none."""
    return math.prod(-(-n // c) for n, c in zip(shape, chunk, strict=True))


def encode_chunk(part: np.ndarray, chunk: Shape, storage: Storage) -> bytes:
    """The stored bytes of a chunk, of which `part` is the lower corner; the rest is zeros."""
    if part.shape != chunk:
        padded = np.zeros(chunk, storage.dtype)
        padded[tuple(slice(n) for n in part.shape)] = part
        part = padded
    body = as_bytes(np.ascontiguousarray(part))
    return b"".join((body, crc32c.crc32c(body).to_bytes(CHECKSUM_BYTES, "little")))


def as_bytes(elements: np.ndarray) -> memoryview:
    """The bytes of a contiguous array, without a copy."""
    return elements.reshape(-1).view(np.uint8).data


def encoded_bytes(chunk: Shape, storage: Storage) -> int:
    """The size of an encoded chunk in bytes."""
    return math.prod(chunk) * storage.dtype.itemsize + CHECKSUM_BYTES


def decode_chunk(encoded: Bytes, chunk: Shape, storage: Storage) -> np.ndarray:
    """The elements of a stored chunk, as a view of `encoded`.

    Raises:
      ChunkError: when the size or the checksum is wrong.
    """
    check_size(len(encoded), chunk, storage)
    body = memoryview(encoded)[:-CHECKSUM_BYTES]
    check_sum([body], encoded[-CHECKSUM_BYTES:])
    return np.frombuffer(body, storage.dtype).reshape(chunk)


def check_size(size: int, chunk: Shape, storage: Storage) -> None:
    """Checks the size of an encoded chunk.

    Raises:
      ChunkError: when it is another one.
    """
    if size != (expected := encoded_bytes(chunk, storage)):
        raise ChunkError(f"{size} bytes instead of {expected}")


def check_sum(body: Sequence[Bytes], checksum: Bytes) -> None:
    """Checks the bytes of a chunk, which may lie in several places, against their checksum.

    Raises:
      ChunkError: when they do not match.
    """
    stored, computed = int.from_bytes(checksum, "little"), 0
    for part in body:
        computed = crc32c.crc32c(part, computed)
    if computed != stored:
        raise ChunkError(f"its checksum is {computed:08x}, stored is {stored:08x}")


def stored_shape(shape: Shape, storage: Storage) -> Shape:
    """The shape of the zarr array that holds an array of `shape`."""
    return (*shape, *storage.extra)


def stored_region(region: Region, storage: Storage) -> Region:
    """`region` of an array as a region of the zarr array that holds it."""
    if not storage.extra:
        return region
    return Region((*region.start, *(0 for _ in storage.extra)), (*region.shape, *storage.extra))
