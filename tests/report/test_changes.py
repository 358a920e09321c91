"""How much changed, with bounded memory."""

import contextlib
import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import flaxckpt
from flaxckpt import comparing as module
from flaxckpt.comparing import bytes_to_read, subtree_changes
from flaxckpt.formats.opening import open_source
from flaxckpt.leaves.spec import LeafSpec
from flaxckpt.source.leaf import Leaf


class ReadArray:
    """An array in memory that records how many elements were read at a time."""

    sharding = None

    def __init__(self, values, chunks=None):
        self.values = np.asarray(values)
        self.dtype, self.shape = self.values.dtype.name, self.values.shape
        self.chunks, self.sizes = chunks or self.shape, []

    def read(self, regions):
        self.sizes += [self.values[region.slices].size for region in regions]
        return [self.values[region.slices] for region in regions]


class InMemorySource:
    """An opened checkpoint with leaves by name."""

    path, nodes, metadata = "x", (), {}

    def __init__(self, leaves):
        self.leaves = [
            Leaf(name, LeafSpec(kind, array.dtype, array.shape), array)
            for name, (kind, array) in leaves.items()
        ]

    def unchanged(self):
        return contextlib.nullcontext()


def source(tree, kind="jax"):
    arrays = {k: v if isinstance(v, ReadArray) else ReadArray(v) for k, v in tree.items()}
    return InMemorySource({name: (kind, array) for name, array in arrays.items()})


def of(*trees):
    return subtree_changes({i: source(tree) for i, tree in enumerate(trees)})


def test_it_is_the_norm_of_the_difference_relative_to_what_was():
    rng = np.random.default_rng(0)
    trees = [{f"a/{n}": rng.normal(size=(3, 4)) for n in "xyz"} for _ in range(3)]
    found = of(*trees)
    assert (found.pairs, found.names) == ([(0, 1), (1, 2)], ["", "a/x", "a/y", "a/z"])
    for row, names in zip(
        found.values, (["a/x", "a/y", "a/z"], ["a/x"], ["a/y"], ["a/z"]), strict=True
    ):
        for (old, new), value in zip(found.pairs, row, strict=True):
            a, b = (np.concatenate([trees[i][n].ravel() for n in names]) for i in (old, new))
            assert value == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a), rel=1e-12)


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 0.0], [1.0, 0.0], math.inf),
        ([1.0, 2.0], [math.nan, 2.0], math.nan),
        ([math.inf, 2.0], [math.inf, 2.0], math.nan),
        ([1.0, 2.0], [1.0, 2.0, 3.0], math.nan),
    ],
)
def test_what_has_no_relative_change(old, new, value):
    (found,) = of({"w": np.array(old)}, {"w": np.array(new)}).values[0]
    np.testing.assert_equal(found, value)


def test_each_block_is_read_once_and_no_more_at_a_time(monkeypatch):
    monkeypatch.setattr(module, "BLOCK_BYTES", 80)
    arrays = [ReadArray(np.full((7, 5), i + 1.0), chunks=(2, 5)) for i in range(3)]
    found = subtree_changes({i: source({"w": array}) for i, array in enumerate(arrays)})
    assert found.values[0] == [1.0, 0.5]
    assert [array.sizes for array in arrays] == [[10, 10, 10, 5]] * 3


def test_large_blocks_are_computed_with_in_pieces(monkeypatch):
    monkeypatch.setattr(module, "_PIECE", 7)
    assert of({"w": np.full(100, 2.0)}, {"w": np.full(100, 3.0)}).values[0] == [0.5]


def test_narrow_dtypes_are_computed_with_as_wide_ones():
    big = np.full(1000, 2e4, np.float16)
    assert of({"w": big}, {"w": big * np.float16(1.5)}).values[0] == [0.5]
    low = np.ones(8, ml_dtypes.bfloat16)
    assert of({"w": low}, {"w": low + low}).values[0] == [1.0]


def test_only_floating_arrays_count():
    arrays = {"a": np.arange(3), "b": np.ones(3), "c": np.ones(3) * 1j}
    leaves = {name: ("jax", ReadArray(values)) for name, values in arrays.items()}
    leaves["d"] = ("float", ReadArray(1.0))
    sources = {i: InMemorySource(leaves) for i in range(2)}
    assert subtree_changes(sources).names == ["", "b"]
    assert bytes_to_read(sources.values()) == 48


def test_leaves_that_are_not_in_all_steps_are_counted():
    found = of({"a": np.ones(2), "b": np.ones(2)}, {"b": np.ones(2), "c": np.ones(2)})
    assert (found.names, found.uncompared) == (["", "b", "c", "a"], 2)
    np.testing.assert_equal(found.values, [[0.0], [0.0], [math.nan], [math.nan]])


def test_a_step_that_lacks_a_leaf_is_not_jumped_over():
    found = of({"a": np.ones(2)}, {"b": np.ones(2)}, {"a": np.ones(2)})
    assert all(math.isnan(value) for row in found.values for value in row)


def test_many_leaves_are_few_rows():
    tree = {f"params/layer_{i}/{name}": np.ones(2) for i in range(20) for name in "abc"}
    assert len(of(tree, tree).names) == 21
    assert of(tree | {f"other/{i}": np.ones(1) for i in range(9)}, tree).names == [
        "",
        "params",
        "other",
    ]


def test_of_real_checkpoints(tmp_path):
    options = flaxckpt.Options(chunk_bytes=256)
    rng = np.random.default_rng(0)
    trees = [{"w": jnp.asarray(rng.normal(size=(30, 11)), jnp.bfloat16), "n": i} for i in range(2)]
    for i, tree in enumerate(trees):
        flaxckpt.save(tmp_path / str(i), tree, options=options)
    read = []
    found = subtree_changes(
        {i: open_source(tmp_path / str(i), options) for i in range(2)}, progress=read.append
    )
    a, b = (np.asarray(tree["w"], np.float64) for tree in trees)
    assert found.values[1] == [pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a))]
    assert sum(read) == 2 * 30 * 11 * 2
