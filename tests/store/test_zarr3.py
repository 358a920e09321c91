from __future__ import annotations

import itertools
import math

import numpy as np
import orjson
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from flaxckpt.leaves.dtypes import ZARR_DATA_TYPES, Storage, parse_dtype, storage_of
from flaxckpt.sharding.chunks import Region, chunks_of, whole
from flaxckpt.store import zarr3

DATA_TYPES = sorted(ZARR_DATA_TYPES)
SHAPES = [
    ((5, 3), (2, 2)),
    ((), ()),
    ((4,), (4,)),
    ((3,), (5,)),
    ((2, 3, 2), (1, 3, 2)),
    ((0, 2), (1, 2)),
]


def sample(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Elements of any bits that are valid for the dtype."""
    dtype, rng = parse_dtype(name), np.random.default_rng(0)
    if "int" in name and dtype.itemsize == 1 and name not in ("int8", "uint8"):
        return rng.integers(-2, 2, shape).astype(dtype)
    if name == "bool":
        return rng.integers(0, 2, shape).astype(dtype)
    bits = 16 if name.startswith("float4") else 256
    raw = rng.integers(0, bits, (*shape, dtype.itemsize), np.uint8)
    return raw.view(dtype)[..., 0].copy()


def ours(array: np.ndarray, chunk: tuple[int, ...], storage: Storage) -> dict[str, bytes]:
    """The keys and values that we write for `array`."""
    values = {"zarr.json": zarr3.array_metadata(array.shape, chunk, storage.data_type)}
    for grid, part in chunks_of(whole(array.shape), chunk):
        encoded = zarr3.encode_chunk(array[part.within(whole(array.shape))], chunk, storage)
        values[zarr3.chunk_key("", grid)] = encoded
    return values


def _open(path, **options) -> ts.TensorStore:
    """A zarr array in `path`, by TensorStore's own driver."""
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}, **options}
    return ts.open(spec | {"store_data_equal_to_fill_value": True}).result()


@pytest.mark.parametrize(("shape", "chunk"), SHAPES, ids=str)
@pytest.mark.parametrize("name", DATA_TYPES)
def test_our_chunks_are_the_bytes_that_tensorstore_writes(tmp_path, name, shape, chunk):
    array = sample(name, shape)
    values = ours(array, chunk, storage_of(name))
    metadata = orjson.loads(values.pop("zarr.json"))
    theirs = _open(tmp_path, metadata=metadata, create=True)
    theirs.write(array).result()
    written = {
        str(p.relative_to(tmp_path)): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()
    }
    del written["zarr.json"]
    assert written == values


@pytest.mark.parametrize(("shape", "chunk"), SHAPES, ids=str)
@pytest.mark.parametrize("name", DATA_TYPES)
def test_tensorstore_reads_what_we_write(tmp_path, name, shape, chunk):
    array = sample(name, shape)
    for key, value in ours(array, chunk, storage_of(name)).items():
        file = tmp_path / key
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(value)
    read = _open(tmp_path, open=True).read().result()
    assert (read.dtype, read.shape) == (array.dtype, array.shape)
    assert read.tobytes() == array.tobytes()


@pytest.mark.parametrize("name", DATA_TYPES)
def test_a_chunk_comes_back_bit_for_bit(name):
    array, storage = sample(name, (2, 3)), storage_of(name)
    back = zarr3.decode_chunk(zarr3.encode_chunk(array, (2, 3), storage), (2, 3), storage)
    assert back.dtype == array.dtype
    assert back.tobytes() == array.tobytes()


@given(st.data())
def test_a_part_of_a_chunk_is_padded_with_zeros(data):
    chunk = tuple(data.draw(st.lists(st.integers(1, 4), max_size=3)))
    shape = tuple(data.draw(st.integers(1, n)) for n in chunk)
    storage, part = storage_of("int16"), np.ones(shape, np.int16)
    back = zarr3.decode_chunk(zarr3.encode_chunk(part, chunk, storage), chunk, storage)
    expected = np.zeros(chunk, np.int16)
    expected[tuple(map(slice, shape))] = 1
    assert (back == expected).all()


def test_every_flipped_bit_of_a_chunk_is_found():
    storage = storage_of("float32")
    encoded = zarr3.encode_chunk(np.arange(6, dtype=np.float32), (6,), storage)
    for at, bit in itertools.product(range(len(encoded)), range(8)):
        damaged = bytearray(encoded)
        damaged[at] ^= 1 << bit
        with pytest.raises(zarr3.ChunkError, match="its checksum is"):
            zarr3.decode_chunk(bytes(damaged), (6,), storage)


@settings(max_examples=50)
@given(st.binary(max_size=40).filter(lambda b: len(b) != 28))
def test_a_chunk_of_another_size_is_found(text):
    with pytest.raises(zarr3.ChunkError, match=f"{len(text)} bytes instead of 28"):
        zarr3.decode_chunk(text, (6,), storage_of("float32"))


def test_a_chunk_of_zeros_without_a_checksum_is_found():
    with pytest.raises(zarr3.ChunkError):
        zarr3.decode_chunk(bytes(28), (6,), storage_of("float32"))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_decoded_chunk_is_a_view_of_what_is_given(kind):
    storage = storage_of("int8")
    encoded = kind(zarr3.encode_chunk(np.ones(3, np.int8), (3,), storage))
    back = zarr3.decode_chunk(encoded, (3,), storage)
    assert np.shares_memory(back, np.frombuffer(encoded, np.uint8))
    assert back.flags.writeable == (kind is bytearray)


def test_an_encoded_chunk_does_not_change_with_its_array():
    array, storage = np.ones(3, np.int8), storage_of("int8")
    encoded = zarr3.encode_chunk(array, (3,), storage)
    array[:] = 2
    assert isinstance(encoded, bytes)
    assert zarr3.decode_chunk(encoded, (3,), storage).tolist() == [1, 1, 1]


@given(st.binary(max_size=50), st.lists(st.integers(0, 50), max_size=4))
def test_a_chunk_that_lies_in_several_places_has_the_same_checksum(text, cuts):
    checksum = zarr3.encode_chunk(np.frombuffer(text, np.uint8), (len(text),), storage_of("uint8"))
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    body = [text[a:b] for a, b in itertools.pairwise(bounds)]
    zarr3.check_sum(body, checksum[-zarr3.CHECKSUM_BYTES :])
    with pytest.raises(zarr3.ChunkError, match="stored is"):
        zarr3.check_sum([*body, b"x"], checksum[-zarr3.CHECKSUM_BYTES :])


def test_a_dtype_without_a_zarr_type_has_one_more_axis():
    storage = storage_of("<U3")
    assert zarr3.stored_shape((2, 5), storage) == (2, 5, 12)
    assert zarr3.stored_region(Region((1, 0), (1, 5)), storage) == Region((1, 0, 0), (1, 5, 12))


@pytest.mark.parametrize(("store", "prefix"), [("a", "a/"), ("a.b/c", "a.b/c/"), ("", "")])
def test_keys_are_those_of_the_specification(store, prefix):
    assert zarr3.metadata_key(store) == f"{prefix}zarr.json"
    assert zarr3.chunk_key(store, (1, 0)) == f"{prefix}c/1/0"
    assert zarr3.chunk_key(store, ()) == f"{prefix}c"


def test_the_size_of_a_chunk_is_its_elements_and_the_checksum():
    encoded = zarr3.encode_chunk(np.ones((2, 2), np.int32), (2, 3), storage_of("int32"))
    assert len(encoded) == math.prod((2, 3)) * 4 + zarr3.CHECKSUM_BYTES
