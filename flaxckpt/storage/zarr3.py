"""Arrays as the zarr v3 core specification has them: metadata, chunk keys, and encoded chunks.

Codecs are `bytes` (little-endian) and `crc32c`: a chunk is its elements in C order, followed by
their CRC-32C as four little-endian bytes. Orbax, TensorStore and every other reader of zarr
verifies that checksum. https://zarr-specs.readthedocs.io/en/latest/v3/codecs/crc32c/index.html
"""

from __future__ import annotations

import functools
import math

import crc32c
import numpy as np
import orjson

from flaxckpt.leaves.dtypes import Storage
from flaxckpt.sharding.chunks import Region, Shape

CHECKSUM_BYTES = 4

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


def encode_chunk(part: np.ndarray, chunk: Shape, storage: Storage) -> bytes | bytearray:
    """The stored bytes of a chunk, of which `part` is the lower corner; the rest is zeros."""
    size = math.prod(chunk) * storage.dtype.itemsize
    encoded = bytearray(size + CHECKSUM_BYTES)
    if part.size:
        full = np.frombuffer(encoded, storage.dtype, math.prod(chunk)).reshape(chunk)
        full[tuple(slice(n) for n in part.shape)] = part
        del full
    checksum = crc32c.crc32c(memoryview(encoded)[:size])
    encoded[size:] = checksum.to_bytes(CHECKSUM_BYTES, "little")
    return encoded


def decode_chunk(encoded: bytes, chunk: Shape, storage: Storage) -> np.ndarray:
    """The elements of a stored chunk, as a read-only view of `encoded`.

    Raises:
      ChunkError: when the size or the checksum is wrong.
    """
    size = math.prod(chunk) * storage.dtype.itemsize
    if len(encoded) != size + CHECKSUM_BYTES:
        raise ChunkError(f"{len(encoded)} bytes instead of {size + CHECKSUM_BYTES}")
    body = memoryview(encoded)[:size]
    stored = int.from_bytes(encoded[size:], "little")
    if (computed := crc32c.crc32c(body)) != stored:
        raise ChunkError(f"its checksum is {computed:08x}, stored is {stored:08x}")
    return np.frombuffer(body, storage.dtype).reshape(chunk)


def stored_shape(shape: Shape, storage: Storage) -> Shape:
    """The shape of the zarr array that holds an array of `shape`."""
    return (*shape, *storage.extra)


def stored_region(region: Region, storage: Storage) -> Region:
    """`region` of an array as a region of the zarr array that holds it."""
    return Region((*region.start, *(0 for _ in storage.extra)), (*region.shape, *storage.extra))
