"""Arrays of other libraries, opened with TensorStore."""

import errno
import json
import shutil

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.formats import zarr
from flaxckpt.formats.zarr import ZarrName, open_all, open_zarr
from flaxckpt.sharding.chunks import Region, whole
from tests import stores

DTYPES = [
    "bool", "int4", "int8", "uint8", "int64", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex64", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn",
]  # fmt: skip


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def write(directory, name, values, chunks=None, *, zarr3=False, ocdbt=False):
    """An array of TensorStore's."""
    base = {"driver": "file", "path": f"{directory}/"}
    kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"} if ocdbt else None
    kvstore = kvstore or {"driver": "file", "path": f"{directory}/{name}/"}
    store = ts.open(
        {
            "driver": "zarr3" if zarr3 else "zarr",
            "kvstore": kvstore,
            "store_data_equal_to_fill_value": True,
        },
        create=True,
        dtype=ts.dtype(values.dtype.name),
        shape=values.shape,
        chunk_layout=ts.ChunkLayout(chunk_shape=chunks or values.shape),
    )
    store.result()[...] = values


def damage(directory, settings=(), array="a"):
    """What opening and reading an array says."""
    with pytest.raises(CorruptCheckpointError) as error:
        opened = open_zarr(stores.at(directory), array, **dict(settings))
        opened.read([whole(opened.shape)])
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("settings", [{}, {"zarr3": True}, {"ocdbt": True}], ids=str)
@pytest.mark.parametrize("name", DTYPES)
def test_values_and_dtypes_come_back(tmp_path, name, settings):
    values = np.arange(6).reshape(2, 3).astype(dtype_of(name))
    write(tmp_path, "a.b", values, **settings)
    array = open_zarr(stores.at(tmp_path), "a.b", **settings)
    assert (array.dtype, array.shape, array.chunks) == (name, (2, 3), (2, 3))
    (found,) = array.read([whole((2, 3))])
    assert found.dtype == values.dtype
    assert found.tobytes() == values.tobytes()


def test_arrays_of_no_axes_and_of_no_elements(tmp_path):
    write(tmp_path, "scalar", np.array(2.5))
    write(tmp_path, "empty", np.zeros((0, 3)), (1, 3))
    scalar, empty = open_all(stores.at(tmp_path), ["scalar", "empty"])
    assert (scalar.shape, scalar.read([whole(())])[0]) == ((), 2.5)
    assert empty.read([whole((0, 3))])[0].shape == (0, 3)


def test_only_the_chunks_that_a_region_touches_are_read(tmp_path):
    values = np.arange(24.0).reshape(4, 6)
    write(tmp_path, "a", values, (2, 3))
    for chunk in ("0.0", "0.1", "1.1"):
        (tmp_path / "a" / chunk).unlink()
    array = open_zarr(stores.at(tmp_path), "a")
    assert array.chunks == (2, 3)
    low, high = array.read([Region((2, 1), (1, 2)), Region((3, 0), (1, 3))])
    assert low.tolist() == [[13.0, 14.0]]
    assert high.tolist() == [[18.0, 19.0, 20.0]]


def test_a_missing_chunk_is_damage_or_zeros(tmp_path):
    write(tmp_path, "a", np.ones(4, np.float32), (2,))
    (tmp_path / "a" / "1").unlink()
    assert "chunk {1} stored at" in damage(tmp_path)
    array = open_zarr(stores.at(tmp_path), "a", missing_as_zero=True)
    assert array.read([whole((4,))])[0].tolist() == [1, 1, 0, 0]


def test_a_truncated_chunk_is_damage(tmp_path):
    write(tmp_path, "a", np.arange(1000.0), (500,))
    chunk = tmp_path / "a" / "1"
    chunk.write_bytes(chunk.read_bytes()[:-20])
    assert f"the array 'a' of {tmp_path} cannot be read: " in damage(tmp_path)


def test_a_checksum_that_is_wrong_is_damage(tmp_path):
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{tmp_path}/a/"},
        "metadata": {"codecs": ["bytes", "crc32c"]},
    }
    store = ts.open(spec, create=True, dtype=ts.float32, shape=[4]).result()
    store[...] = 1
    chunk = tmp_path / "a/c/0"
    data = bytearray(chunk.read_bytes())
    data[0] ^= 1
    chunk.write_bytes(data)
    assert "Digest mismatch" in damage(tmp_path, {"zarr3": True})


def test_a_missing_array_names_the_file(tmp_path):
    assert f'"{tmp_path}/a/.zarray" does not exist' in damage(tmp_path)
    assert '"a/.zarray" in OCDBT database' in damage(tmp_path, {"ocdbt": True})


def test_a_database_without_its_data_is_damage(tmp_path):
    write(tmp_path, "a", np.arange(4000.0), ocdbt=True)
    shutil.rmtree(tmp_path / "d")
    assert "the array 'a' of" in damage(tmp_path, {"ocdbt": True})


def test_a_truncated_manifest_is_damage(tmp_path):
    write(tmp_path, "a", np.arange(4.0), ocdbt=True)
    manifest = tmp_path / "manifest.ocdbt"
    manifest.write_bytes(manifest.read_bytes()[:30])
    assert "manifest" in damage(tmp_path, {"ocdbt": True})


def test_metadata_are_assumed_where_there_are_none(tmp_path):
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    write(tmp_path, "a", values)
    zarray = json.loads((tmp_path / "a/.zarray").read_text())
    (tmp_path / "a/.zarray").unlink()
    metadata = {key: zarray[key] for key in ("shape", "chunks", "compressor")}
    wanted = ZarrName("a", {"dtype": "float32", "metadata": metadata, "kvstore": "elsewhere"})
    assert (
        open_zarr(stores.at(tmp_path), wanted).read([whole((3, 2))])[0].tolist() == values.tolist()
    )


def test_metadata_that_are_there_win_over_assumed_ones(tmp_path):
    write(tmp_path, "a", np.arange(6.0), (3,))
    wanted = ZarrName("a", {"dtype": "int8", "metadata": {"shape": [2], "chunks": [2]}})
    array = open_zarr(stores.at(tmp_path), wanted)
    assert (array.dtype, array.shape, array.chunks) == ("float64", (6,), (3,))


@pytest.mark.parametrize("name", ["../a", "a/../../b", "/etc", "a/./b", "a\0"])
def test_no_name_leads_out_of_the_directory(tmp_path, name):
    with pytest.raises(CorruptCheckpointError, match="which is not inside of it"):
        open_zarr(stores.at(tmp_path), name)


ZARRAY = {
    "chunks": [4], "compressor": None, "dimension_separator": ".", "dtype": "<f4",
    "fill_value": None, "filters": None, "order": "C", "shape": [4], "zarr_format": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"shape": [1 << 40]}, "it is said to have 274877906944 chunks"),
        ({"shape": [1 << 40], "chunks": [1 << 40]}, "have 4398046511104 bytes, but its files"),
        ({"shape": [1 << 60], "chunks": [1 << 30]}, "its shape (1152921504606846976,) is too"),
        ({"shape": [-1]}, 'Error parsing object member "shape"'),
        ({"dtype": "|O"}, 'Unsupported zarr dtype: "|O"'),
        ({"dtype": "|V8"}, "its dtype byte is not one of jax or numpy"),
        ({"chunks": 3}, 'Error parsing object member "chunks"'),
    ],
    ids=str,
)
def test_what_an_array_claims_is_checked(tmp_path, changed, problem):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/.zarray").write_text(json.dumps(ZARRAY | changed))
    with pytest.raises(CorruptCheckpointError) as error:
        open_zarr(stores.at(tmp_path), "a", missing_as_zero=True)
    assert problem in str(error.value)


def test_what_the_system_refuses_is_no_damage(tmp_path):
    message = "PERMISSION_DENIED: x [os_error_code='13' source locations='y']"
    with pytest.raises(OSError, match="PERMISSION_DENIED: x") as error:
        with zarr.explained(stores.at(tmp_path), "a"):
            raise ValueError(message)
    assert error.value.errno == errno.EACCES


def test_all_arrays_are_opened_at_once(tmp_path, monkeypatch):
    for i in range(5):
        write(tmp_path, f"a{i}", np.full(2, i))
    events = []
    start, finish = zarr._Opener.start, zarr._Opener.finish
    monkeypatch.setattr(zarr._Opener, "start", lambda *a: events.append("start") or start(*a))
    monkeypatch.setattr(zarr._Opener, "finish", lambda *a: events.append("finish") or finish(*a))
    arrays = open_all(stores.at(tmp_path), [f"a{i}" for i in range(5)])
    assert events == ["start"] * 5 + ["finish"] * 5
    assert [a.read([whole((2,))])[0][0] for a in arrays] == [0, 1, 2, 3, 4]
