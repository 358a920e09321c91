"""safetensors files: those of the library and damaged ones, whole and in parts."""

import contextlib
import json
import struct
from pathlib import Path
from unittest import mock

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.flax
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import flaxckpt
from flaxckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsupportedLeafError
from flaxckpt.formats import safetensors as reader
from flaxckpt.formats.safetensors import DTYPES, TensorEntry, build, parse
from flaxckpt.leaves.spec import LeafSpec
from flaxckpt.sharding.chunks import Region, whole
from flaxckpt.store.bucket import BucketStore
from flaxckpt.store.local import LocalStore
from tests import stores
from tests.stores import at

SAMPLES = Path(__file__).parents[1] / "samples" / "safetensors"
MIB = 1 << 20


def framed(header, data=b""):
    """A file of that header, JSON or anything that becomes JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype="U8", shape=(1,), offsets=(0, 1)):
    """What a header says of a tensor."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def values(path):
    """All tensors of what is at `path`, as the reader alone gives them."""
    return {
        n: leaf.array.read([whole(leaf.array.shape)])[0]
        for n, leaf in reader.read(at(path)).items()
    }


def assert_is(found, dtype, shape, elements):
    """Compares an array with what is written in a test."""
    assert type(found) is np.ndarray
    assert (found.dtype.name, found.shape) == (dtype, shape)
    assert found.astype(np.float64).ravel().tolist() == elements


# What other programs wrote

KINDS = {
    "f64": ("float64", (1,), [1.0]),
    "empty": ("float32", (0, 2), []),
    "scalar": ("float32", (), [2.0]),
    "bf16": ("bfloat16", (3,), [1.0, 1.0, 1.0]),
    "e4m3": ("float8_e4m3fn", (3,), [1.0, 1.0, 1.0]),
    "i8": ("int8", (3,), [1.0, 1.0, 1.0]),
    "bool": ("bool", (1,), [1.0]),
}
PARTS = {
    "Dense_0.kernel": ("float32", (4, 3), [1.0] * 12),
    "Dense_1.kernel": ("float32", (3, 2), [1.0] * 6),
}
# The bytes of float32s, as `xxd` shows them.
MODEL = {
    "Dense_0.bias": ((2,), "361283ba361283ba"),
    "Dense_0.kernel": ((3, 2), "0b6574bf3089de3ec6e34bbf705ffcbea5a1073f27773d3f"),
    "Dense_1.bias": ((3,), "361283ba361283ba361283ba"),
    "Dense_1.kernel": (
        (4, 3),
        "02fe2d3ae6f1223ede1bb73dbfb3d7be424ca43e5d2cdf3e"
        "1d1b0fbfc0fdb8be8564be3ecea2743e4e00613e9970a83e",
    ),
}


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("kinds.safetensors", KINDS),
        ("model.safetensors.index.json", PARTS),
        ("model-00001-of-00002.safetensors", {"Dense_0.kernel": PARTS["Dense_0.kernel"]}),
    ],
)
def test_a_sample_is_read(name, table):
    found = values(SAMPLES / name)
    assert list(found) == list(table)
    for tensor_name, expected in table.items():
        assert_is(found[tensor_name], *expected)
    restored = flaxckpt.restore(SAMPLES / name)
    assert restored.keys() == table.keys()
    for tensor_name, expected in table.items():
        assert_is(restored[tensor_name], *expected)


@pytest.mark.parametrize("where", [SAMPLES, SAMPLES / "model.safetensors"])
def test_a_directory_is_its_model(where):
    found = values(where)
    assert list(found) == list(MODEL)
    for name, (shape, dump) in MODEL.items():
        assert (found[name].dtype, found[name].shape) == (np.float32, shape)
        assert found[name].tobytes().hex() == dump


def everything():
    """A tensor of each dtype that the library can write, in several shapes."""
    rng = np.random.default_rng(0)
    tree = {}
    for name in DTYPES.values():
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        tree[f"{name}.vector"] = rng.integers(1, 3, 5).astype(dtype)
        tree[f"{name}.cube"] = rng.integers(1, 3, (2, 3, 4)).astype(dtype)
        tree[f"{name}.scalar"] = np.ones((), dtype)
        tree[f"{name}.empty"] = np.zeros((2, 0), dtype)
    return tree


def test_what_the_library_writes_is_read(tmp_path):
    tree = {**everything(), "ü/%'\" \n.": np.arange(3), "0": np.ones(1), "": np.ones(2)}
    safetensors.numpy.save_file(tree, tmp_path / "a.safetensors", {"format": "flax"})
    restored = flaxckpt.restore(tmp_path / "a.safetensors")
    assert restored.keys() == tree.keys()
    for name, expected in tree.items():
        assert restored[name].dtype == expected.dtype, name
        np.testing.assert_array_equal(restored[name], expected)
        assert restored[name].flags.writeable


def test_the_header_is_that_of_the_library():
    tree = everything()
    text = safetensors.numpy.save(tree, {"a": "ü"})
    length = int.from_bytes(text[:8], "little")
    entries = parse(text[8 : 8 + length], "f")
    made, placed = build(
        [TensorEntry(n, a.dtype.name, a.shape) for n, a in tree.items()], {"a": "ü"}
    )
    assert made == text[: 8 + length]
    assert placed == entries
    assert build(placed[::-1], {"a": "ü"})[0] == made


def test_leaves_are_numpy_arrays_of_that_type():
    leaf = reader.read(at(SAMPLES / "kinds.safetensors"))["bf16"]
    assert leaf.spec == LeafSpec("numpy", "bfloat16", (3,))
    assert (leaf.array.dtype, leaf.array.shape, leaf.array.sharding) == ("bfloat16", (3,), None)


def test_a_bool_is_anything_but_zero(tmp_path):
    file = tmp_path / "a.safetensors"
    file.write_bytes(framed({"a": tensor("BOOL", (4,), (0, 4))}, bytes([0, 1, 2, 255])))
    assert values(file)["a"].view(np.uint8).tolist() == [0, 1, 1, 1]


# What is found where


def test_an_index_alone_or_a_header_is_found(tmp_path):
    blob = tmp_path / "blob"  # as the hub's cache calls what its links lead to
    blob.write_bytes(framed({"a": tensor()}, b"\7"))
    (tmp_path / "part.safetensors").symlink_to(blob)
    index = {"metadata": {"total_size": 1}, "weight_map": {"a": "part.safetensors"}}
    (tmp_path / "other.safetensors.index.json").write_text(json.dumps(index))
    for where in (tmp_path, blob, tmp_path / "part.safetensors"):
        assert reader.detect(at(where))
        assert values(where)["a"].tolist() == [7]


def test_what_is_something_else_is_left_to_others(tmp_path):
    (tmp_path / "file").write_bytes(b"\x93NUMPY and more")
    (tmp_path / "short").write_bytes(b"{")
    for name in ("file", "short", "missing", "."):
        assert not reader.detect(at(tmp_path / name))
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    assert not reader.detect(at(tmp_path))  # which of the two?
    with pytest.raises(CheckpointNotFoundError, match=r"a\.safetensors\.index\.json, b\.safe"):
        flaxckpt.restore(tmp_path)


# Damage

BAD_HEADERS = {
    "not JSON": b"{not json}",
    "another encoding": '{"ü":1}'.encode("latin-1"),
    "a list": b'["a"]',
    "a space first": b' {"a":1}',
    "deep": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a number of many digits": b'{"a":' + b"1" * 10_000 + b"}",
    "a name twice": b'{"a":%b,"a":%b}' % ((json.dumps(tensor()).encode(),) * 2),
    "half of a surrogate pair": b'{"\\ud800":%b}' % json.dumps(tensor()).encode(),
    "no tensor": {"a": 1},
    "no offsets": {"a": {"dtype": "U8", "shape": [1]}},
    "one offset": {"a": tensor(offsets=(0,))},
    "no list": {"a": {"dtype": "U8", "shape": 1, "data_offsets": [0, 1]}},
    "an unknown dtype": {"a": tensor("U9")},
    "a negative axis": {"a": tensor(shape=(-1, -1))},
    "a float axis": {"a": tensor(shape=(1.0,))},
    "a bool axis": {"a": tensor(shape=(True,))},
    "a huge axis": {"a": tensor(shape=(0, 1 << 62), offsets=(0, 0))},
    "huge axes": {"a": tensor(shape=(0, 1 << 30, 1 << 30), offsets=(0, 0))},
    "many axes": {"a": tensor(shape=(1,) * 65)},
    "a negative offset": {"a": tensor(offsets=(-1, 0))},
    "offsets the wrong way": {"a": tensor(offsets=(1, 0))},
    "too few bytes": {"a": tensor("F32", (1,), (0, 1))},
    "a gap": {"a": tensor(), "b": tensor(offsets=(2, 3))},
    "a gap at the start": {"a": tensor(offsets=(1, 2))},
    "an overlap": {"a": tensor(), "b": tensor(offsets=(0, 1))},
    "metadata that are a list": {"__metadata__": [], "a": tensor()},
    "metadata that are numbers": {"__metadata__": {"a": 1}, "a": tensor()},
    "an end beyond the file": {"a": tensor(shape=(9,), offsets=(0, 9))},
    "an end before that of the file": {},
}


@pytest.mark.parametrize("header", BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_a_bad_header_is_refused(tmp_path, header):
    file = tmp_path / "a.safetensors"
    file.write_bytes(framed(header, b"123"))
    with pytest.raises(CorruptCheckpointError) as caught:
        flaxckpt.restore(file)
    assert str(file) in str(caught.value)
    if isinstance(header, dict) and list(header) == ["a"] and "beyond" not in str(header):
        assert "'a'" in str(caught.value) or "bytes, but its header" in str(caught.value)


@pytest.mark.parametrize(
    "prefix", [b"", b"\0" * 8, b"\1\0\0", b"\xff" * 8, struct.pack("<Q", 10**8)]
)
def test_a_bad_length_is_refused(tmp_path, prefix):
    file = tmp_path / "a.safetensors"
    file.write_bytes(prefix)
    with pytest.raises(CorruptCheckpointError, match=r"a\.safetensors"):
        flaxckpt.restore(file)


def test_what_git_lfs_leaves_is_called_that(tmp_path):
    file = tmp_path / "a.safetensors"
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 420\n")
    with pytest.raises(CorruptCheckpointError, match="git lfs pull"):
        flaxckpt.restore(file)


@pytest.mark.parametrize("code", ["F4", "F6_E2M3", "F6_E3M2"])
def test_values_of_less_than_a_byte_are_refused(tmp_path, code):
    file = tmp_path / "a.safetensors"
    file.write_bytes(framed({"w": tensor(code, (4,), (0, 3))}, b"123"))
    with pytest.raises(UnsupportedLeafError, match=rf"tensor w in .*a\.safetensors .* {code}"):
        flaxckpt.restore(file)


def test_every_damaged_byte_gives_a_tree_or_an_error(tmp_path):
    file = tmp_path / "a.safetensors"
    text = framed({"a": tensor("F32", (2,), (0, 8)), "b": tensor("U8", (2, 2), (8, 12))}, bytes(12))
    damaged = [text[:n] for n in range(len(text))]
    for position in range(len(text)):
        for mask in (0x01, 0x08, 0x80, 0xFF):
            damaged.append(text[:position] + bytes([text[position] ^ mask]) + text[position + 1 :])
    refused = 0
    for data in damaged:
        file.write_bytes(data)
        try:
            values(file)
        except CorruptCheckpointError as error:
            refused += str(file) in str(error)
    assert refused > len(damaged) * 3 / 4


@pytest.mark.parametrize(
    ("weight_map", "why"),
    [
        (None, "no weight_map"),
        ([], "no weight_map"),
        ({"a": 1}, "'a' is in 1, which is not the name"),
        ({"a": "../model.safetensors"}, "not the name"),
        ({"a": "/etc/x.safetensors"}, "not the name"),
        ({"a": "passwd"}, "not the name"),
        ({"b": "part.safetensors"}, "'b' is in part.safetensors, which has none"),
        ({"a": "gone.safetensors"}, "gone.safetensors is missing"),
    ],
)
def test_a_bad_index_is_refused(tmp_path, weight_map, why):
    (tmp_path / "part.safetensors").write_bytes(framed({"a": tensor()}, b"\7"))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CorruptCheckpointError, match=why):
        flaxckpt.restore(index)


def test_a_file_that_shrinks_is_damaged(tmp_path):
    file = tmp_path / "a.safetensors"
    safetensors.numpy.save_file({"a": np.arange(100)}, file)
    leaf = reader.read(at(file))["a"]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError, match="ends before byte"):
        leaf.array.read([whole((100,))])


# Parts


class Counted:
    """How many bytes of files are read."""

    def __init__(self):
        self.reads = []

    def __enter__(self):
        self._patches = contextlib.ExitStack()
        for kind in (LocalStore, BucketStore):
            patch = mock.patch.object(kind, "read", self._counting(kind.read))
            self._patches.enter_context(patch)
        return self

    def _counting(self, read):
        def counting(store, at, start, stop):
            found = read(store, at, start, stop)
            self.reads.append(len(found))
            return found

        return counting

    def __exit__(self, *error):
        self._patches.__exit__(*error)

    @property
    def nbytes(self):
        """All of them together."""
        return sum(self.reads)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A file of 32 MiB, and its array."""
    file = tmp_path_factory.mktemp("large") / "a.safetensors"
    array = np.random.default_rng(0).integers(0, 1 << 30, (4096, 2048), dtype=np.int32)
    safetensors.numpy.save_file({"a": array}, file)
    return file, array


def test_a_chunk_is_8_mib_of_rows(large):
    file, _ = large
    assert reader.read(at(file))["a"].array.chunks == (1024, 2048)


@pytest.mark.parametrize(
    ("region", "nbytes"),
    [
        (Region((5, 0), (1, 2048)), 8192),
        (Region((1000, 0), (100, 2048)), 819200),
        (Region((4095, 2047), (1, 1)), 4),
        (Region((10, 100), (2, 50)), 8192 + 200),
        (Region((0, 0), (0, 2048)), 0),
    ],
)
def test_a_slice_reads_only_its_bytes(large, region, nbytes):
    file, array = large
    leaf = reader.read(at(file))["a"]
    with Counted() as counted:
        (found,) = leaf.array.read([region])
    np.testing.assert_array_equal(found, array[region.slices])
    assert counted.nbytes == nbytes


def test_distant_runs_are_read_one_by_one(tmp_path):
    array = np.arange(4 * (1 << 18), dtype=np.int32).reshape(4, 1 << 18)
    safetensors.numpy.save_file({"a": array}, tmp_path / "a.safetensors")
    leaf = reader.read(at(tmp_path / "a.safetensors"))["a"]
    with Counted() as counted:
        (found,) = leaf.array.read([Region((0, 7), (4, 100))])
    np.testing.assert_array_equal(found, array[:, 7:107])
    assert counted.reads == [400] * 4


@pytest.mark.parametrize("spec", [("x",), (None, "x"), ("x", "y"), ("y",), ()])
def test_a_mesh_reads_what_it_needs_once(large, spec):
    file, array = large
    shape = {("x", "y"): (4, 2), ("y",): (2, 4)}.get(spec, (8, 1))
    mesh = Mesh(np.reshape(jax.devices(), shape), ("x", "y"))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    target = {"a": jax.ShapeDtypeStruct(array.shape, np.int32, sharding=sharding)}
    with Counted() as counted:
        restored = flaxckpt.restore(file, target)["a"]
    assert restored.sharding == sharding
    np.testing.assert_array_equal(restored, array)
    assert array.nbytes <= counted.nbytes <= array.nbytes + 1024
    assert max(counted.reads) <= 8 * MIB


def test_any_region_is_that_of_the_array(tmp_path):
    rng = np.random.default_rng(1)
    array = rng.integers(0, 255, (7, 5, 3, 11), dtype=np.uint16)
    safetensors.numpy.save_file({"a": array}, tmp_path / "a.safetensors")
    with mock.patch.multiple(reader, CHUNK_BYTES=100, GAP_BYTES=9):
        leaf = reader.read(at(tmp_path / "a.safetensors"))["a"]
        for _ in range(200):
            start = [int(rng.integers(0, n)) for n in array.shape]
            sizes = [
                int(rng.integers(0, n - s + 1)) for n, s in zip(array.shape, start, strict=True)
            ]
            regions = [Region(tuple(start), tuple(sizes)), Region((1, 1, 1, 1), (2, 3, 1, 4))]
            for region, found in zip(regions, leaf.array.read(regions), strict=True):
                np.testing.assert_array_equal(found, array[region.slices])


def test_a_bucket_is_read_in_parts_too(tmp_path, large):
    file, array = large
    with stores.opened("gcs", tmp_path) as store:
        store.write("models", "model-1.safetensors", file.read_bytes())
        index = {"weight_map": {"a": "model-1.safetensors"}}
        store.write("models", "model.safetensors.index.json", json.dumps(index).encode())
        store.write("models", "bad.safetensors", file.read_bytes()[:-1])
        options = store.options()
        with Counted() as counted:
            restored = flaxckpt.restore(store.url("models"), options=options)
            assert counted.nbytes <= array.nbytes + 1024
        np.testing.assert_array_equal(restored["a"], array)
        with pytest.raises(CorruptCheckpointError, match=r"bad\.safetensors ends before byte"):
            flaxckpt.restore(store.url("models/bad.safetensors"), options=options)
        with pytest.raises(CheckpointNotFoundError):
            flaxckpt.restore(store.url("models/none.safetensors"), options=options)
