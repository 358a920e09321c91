"""A checkpoint as a mapping of leaves, of which only what is asked for is read."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt import errors
from flaxckpt.tree.structure import flatten
from tests.reads import Reads

# Chunks of these arrays have at most 64 elements.
CHUNKS = flaxckpt.Options(chunk_bytes=256)
ARRAYS = {
    "three": np.arange(7 * 6 * 5, dtype=np.int32).reshape(7, 6, 5),
    "two": np.arange(130, dtype=np.float32).reshape(10, 13),
    "long": np.arange(200, dtype=np.int64),
    "half": np.arange(60).astype(ml_dtypes.bfloat16).reshape(4, 15),
    "text": np.array([["a", "bc", ""], ["d", "é", "fgh"]]),
    "none": np.zeros((3, 0, 2), np.float32),
    "point": np.array(2.5),
}
KEYS = jax.random.split(jax.random.key(0), 6).reshape(3, 2)
OTHERS = {"big": 10**30, "bytes": b"\0x", "complex": 1 + 2j, "flag": True, "n": 7, "x": 0.5}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("lazy") / "x"
    tree = {"arrays": ARRAYS, "keys": KEYS, "others": OTHERS, "words": "héllo",
            "scalar": np.float16(1.5), "jax": jnp.arange(3, dtype=jnp.bfloat16),
            "strings": np.array(["a", "long one"], np.dtypes.StringDType())}  # fmt: skip
    flaxckpt.save(path, tree, options=CHUNKS)
    return path


@pytest.fixture
def leaves(saved):
    return flaxckpt.lazy(saved)


# A mapping


def test_it_is_a_mapping_in_the_order_of_jax(saved, leaves):
    names = list(leaves)
    assert names == list(flatten(flaxckpt.restore(saved)).names)
    assert len(leaves) == len(names) == 18
    assert names[:2] == ["arrays/half", "arrays/long"]
    assert "arrays/two" in leaves
    assert "arrays" not in leaves
    assert leaves.get("arrays") is None
    assert {leaf.name for leaf in leaves.values()} == set(names)
    with pytest.raises(KeyError, match="arrays/tow"):
        leaves["arrays/tow"]


def test_it_shows_where_it_is_and_what_a_leaf_is(saved, leaves):
    assert repr(leaves) == f"LazyCheckpoint('{saved}', 18 leaves)"
    assert repr(leaves["arrays/two"]) == "Leaf(arrays/two: float32[10,13])"
    assert repr(leaves["keys"]) == "Leaf(keys: key<threefry2x32>[3,2])"


def test_a_leaf_alone(tmp_path):
    flaxckpt.save(tmp_path / "x", np.arange(3))
    assert dict(flaxckpt.lazy(tmp_path / "x"))[""].read().tolist() == [0, 1, 2]


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(errors.CheckpointNotFoundError):
        flaxckpt.lazy(tmp_path)


# Types


@pytest.mark.parametrize("name", ARRAYS)
def test_the_type_of_an_array(leaves, name):
    leaf, array = leaves[f"arrays/{name}"], ARRAYS[name]
    assert (leaf.shape, leaf.dtype) == (array.shape, array.dtype)
    assert leaf.nbytes == array.nbytes
    assert leaf.sharding is None


def test_the_types_of_what_is_no_array(leaves):
    assert (leaves["scalar"].shape, leaves["scalar"].dtype) == ((), np.float16)
    assert leaves["keys"].shape == (3, 2)
    assert leaves["keys"].nbytes == 3 * 2 * 8
    for name in ("words", "keys", "strings", *(f"others/{name}" for name in OTHERS)):
        assert leaves[name].dtype is None
    assert (leaves["words"].shape, leaves["words"].nbytes) == ((), 0)


def test_the_sharding_that_it_was_saved_with(tmp_path):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = {"rows": P("x"), "both": P("y", "x"), "flat": P(("x", "y")), "cols": P(None, "y"),
             "whole": P()}  # fmt: skip
    tree = {
        name: jax.device_put(jnp.arange(128.0).reshape(16, 8), NamedSharding(mesh, spec))
        for name, spec in specs.items()
    }
    keys = jax.random.split(jax.random.key(0), 8)
    tree["keys"] = jax.device_put(keys, NamedSharding(mesh, P("x")))
    tree["one"] = jnp.ones(3)
    flaxckpt.save(tmp_path / "x", tree)
    leaves = flaxckpt.lazy(tmp_path / "x")
    for name, spec in specs.items():
        found = leaves[name].sharding
        assert found.mesh == AbstractMesh((4, 2), ("x", "y"))
        # It can be used on a mesh of today.
        assert NamedSharding(mesh, found.spec).is_equivalent_to(NamedSharding(mesh, spec), 2)
        assert (leaves[name].read(np.s_[5:7]) == np.asarray(tree[name][5:7])).all()
    assert leaves["keys"].sharding.mesh.shape == {"x": 4, "y": 2}
    assert leaves["one"].sharding is None


# Values


def part(length):
    bounds = st.none() | st.integers(-length - 2, length + 2)
    steps = st.none() | st.integers(-4, 4).filter(bool)
    inside = [st.integers(-length, length - 1)] if length else []
    return st.one_of(*inside, st.builds(slice, bounds, bounds, steps))


@st.composite
def indices(draw, shape):
    """An index of an array: for some of its first and last axes, with `...` or without."""
    keys = [draw(part(length)) for length in shape]
    if draw(st.booleans()):
        begin = draw(st.integers(0, len(keys)))
        end = draw(st.integers(begin, len(keys)))
        keys[begin:end] = [...]
    else:
        del keys[draw(st.integers(0, len(keys))) :]
    return keys[0] if len(keys) == 1 and draw(st.booleans()) else tuple(keys)


cases = st.sampled_from(sorted(ARRAYS)).flatmap(
    lambda name: st.tuples(st.just(name), indices(ARRAYS[name].shape))
)


@given(case=cases)
@settings(max_examples=100)
@example(case=("three", (slice(5, 1, -2), ..., -1)))
@example(case=("three", np.s_[-1:, np.int64(2)]))
@example(case=("long", np.s_[150:3:-7]))
@example(case=("long", np.s_[5:5]))
@example(case=("two", ...))
@example(case=("two", np.s_[0, 0, ...]))
@example(case=("point", ...))
@example(case=("two", ()))
@example(case=("half", np.s_[1:3, ::2]))
def test_a_part_is_what_numpy_would_give(saved, case):
    name, index = case
    found, expected = flaxckpt.lazy(saved)[f"arrays/{name}"].read(index), ARRAYS[name][index]
    assert type(found) is type(expected)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_array_equal(found, expected)


def test_an_array_without_axes_is_an_array(leaves):
    assert isinstance(leaves["arrays/point"].read(), np.ndarray)
    assert isinstance(leaves["arrays/two"].read(np.s_[0, 0, ...]), np.ndarray)
    assert isinstance(leaves["arrays/two"].read(np.s_[0, 0]), np.generic)


@pytest.mark.parametrize(
    "index",
    [10, -11, np.s_[0, 13], np.s_[0, 0, 0], np.s_[..., 0, ...], None, np.s_[0, None], [0, 1],
     np.array([1]), 1.0, True, np.True_, "a", np.s_[0, [1]]],
)  # fmt: skip
def test_what_does_not_fit_the_shape_is_an_index_error(leaves, index):
    with pytest.raises(IndexError):
        leaves["arrays/two"].read(index)


def test_an_index_error_says_what_is_wrong(leaves):
    with pytest.raises(
        IndexError, match=r"the index \(0, 0, 0\) does not fit the shape \(10, 13\)"
    ):
        leaves["arrays/two"].read((0, 0, 0))
    with pytest.raises(IndexError, match=r"the index None is not an integer, a slice or \.\.\."):
        leaves["arrays/two"].read(None)


def test_jax_arrays_come_as_numpy_arrays(leaves):
    values = leaves["jax"].read(np.s_[1:])
    assert isinstance(values, np.ndarray)
    assert values.dtype == jnp.bfloat16
    assert values.tolist() == [1, 2]


def test_what_is_read_may_be_changed(leaves):
    values = leaves["arrays/two"].read()
    values[...] = 0
    assert leaves["arrays/two"].read()[1, 0] == 13


@pytest.mark.parametrize("name", OTHERS)
def test_numbers_and_bytes_come_as_they_were_saved(leaves, name):
    value = leaves[f"others/{name}"].read()
    assert value == OTHERS[name]
    assert type(value) is type(OTHERS[name])


def test_texts_and_scalars_come_as_they_were_saved(leaves):
    assert leaves["words"].read() == "héllo"
    assert type(leaves["scalar"].read()) is np.float16
    assert leaves["scalar"].read() == 1.5
    assert leaves["strings"].read().tolist() == ["a", "long one"]
    assert leaves["strings"].read().dtype == np.dtypes.StringDType()


@pytest.mark.parametrize("name", ["words", "others/n", "others/big", "scalar"])
def test_what_has_no_axes_has_no_parts(leaves, name):
    with pytest.raises(IndexError):
        leaves[name].read(0)


@pytest.mark.parametrize(
    "index", [..., 1, (2, 0), np.s_[1:], np.s_[::-1], np.s_[:, 1], np.s_[..., 0], np.s_[2:0:-1, 0]]
)
def test_a_part_of_prng_keys(leaves, index):
    found, expected = leaves["keys"].read(index), KEYS[index]
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert (jax.random.key_data(found) == jax.random.key_data(expected)).all()


# What is read


def test_nothing_is_read_before_it_is_asked_for(saved, monkeypatch):
    reads = Reads(monkeypatch)
    leaves = flaxckpt.lazy(saved)
    for leaf in leaves.values():
        assert leaf.nbytes >= 0
        assert repr(leaf)
        assert leaf.sharding is None
    assert reads.nbytes == 0


def test_only_the_chunks_of_a_part_are_read(tmp_path, monkeypatch):
    array = np.arange(400_000, dtype=np.float32).reshape(400, 1000)
    flaxckpt.save(tmp_path / "x", {"w": array}, options=flaxckpt.Options(chunk_bytes=40_000))
    leaf = flaxckpt.lazy(tmp_path / "x")["w"]
    reads = Reads(monkeypatch)
    for index, chunks in [(0, 1), (-1, 1), (np.s_[5:15], 2), (np.s_[::-1, 3], 40), (..., 40)]:
        nbytes = reads.of(lambda index=index: leaf.read(index))
        assert chunks * 40_000 <= nbytes < 1.01 * chunks * 40_000
    assert reads.of(lambda: leaf.read(np.s_[7:7])) == 0
    assert reads.of(lambda: leaf.read(np.s_[300:2:-290])) < array.nbytes


def test_each_read_reads_anew_and_many_at_once(saved):
    leaf = flaxckpt.lazy(saved)["arrays/three"]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(leaf.read, range(7)))
    assert (np.stack(found) == ARRAYS["three"]).all()


def test_a_damaged_leaf_is_named(tmp_path):
    flaxckpt.save(tmp_path / "x", {"bad": np.arange(20_000.0), "good": np.ones(3)})
    (data,) = [p for p in (tmp_path / "x/state/d").iterdir() if p.stat().st_size > 100_000]
    content = bytearray(data.read_bytes())
    content[80_000] ^= 1
    data.write_bytes(content)
    leaves = flaxckpt.lazy(tmp_path / "x")
    assert leaves["good"].read().tolist() == [1, 1, 1]
    with pytest.raises(errors.CorruptCheckpointError, match="the leaf bad is damaged"):
        leaves["bad"].read()


def test_of_a_checkpoint_that_was_replaced_nothing_is_read(tmp_path):
    flaxckpt.save(tmp_path / "x", {"w": np.zeros(3)})
    leaf = flaxckpt.lazy(tmp_path / "x")["w"]
    flaxckpt.save(tmp_path / "x", {"w": np.ones(3)}, overwrite=True)
    with pytest.raises(errors.CheckpointNotFoundError, match="deleted or replaced"):
        leaf.read()
