"""A checkpoint that was written by any released version loads for ever.

`tests/golden/format_1` was written by `write(...)` below, with version 0.1.0, and what is below
`tests/golden/runs` by `write_run(...)`: that has what came to that format later (items, the saves
before, `save_dtype`). A new format gets a new directory; those that are there are never written
again.

    python -m tests.source.test_golden checkpoint tests/golden/format_2
    python -m tests.source.test_golden run tests/golden/runs/format_2
"""

import collections
import shutil
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze

import flaxckpt
from flaxckpt.run.run import Run, history
from tests.stores import at
from tests.trees import assert_same

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("format_*"))
RUNS = sorted((Path(__file__).parents[1] / "golden" / "runs").iterdir())
# In the run, this step was saved, and those before it deleted.
KEPT, GONE = 30, (10, 20)


def tree():
    """One of each: containers, empties, kinds of leaves, ways to store a dtype."""
    params = {"dense": {"kernel": jnp.arange(12.0).reshape(3, 4), "bias": jnp.zeros(4)}}
    words = jnp.arange(8, dtype=jnp.uint32)
    return {
        "params": freeze(params),
        "opt_state": optax.adamw(1e-3).init(params),
        "masked": (optax.MaskedNode(), None, (), [], {}),
        "boxed": nn.LogicallyPartitioned(jnp.ones((2, 3)), names=("embed", "mlp")),
        "nnx": nnx.State({"w": {0: nnx.Param(jnp.ones(2))}, "s": nnx.BatchStat(jnp.zeros(1))}),
        "ordered": collections.OrderedDict([("z", 1), ("a", 2)]),
        "default": collections.defaultdict(list, {"k": [3]}),
        "keys": {
            "fry": jax.random.wrap_key_data(words.reshape(4, 2), impl="threefry2x32"),
            "rbg": jax.random.wrap_key_data(words[:4], impl="rbg"),
        },
        "odd keys": {"a/b": 1, "a.b": 2, "": 3, "..": 4, "7": 5, "%2F": 6, "é": 7},
        "int keys": {7: jnp.int8(1), 10: jnp.int8(2)},
        "tuple keys": {(1, "a"): 1.5},
        "python": [True, -3, 2**70, 0.1, 1 - 2j, "text", "\ud800", b"\x00\xff"],
        "numpy": [np.float32(2.5), np.arange(3)[::-1], np.array(["a", "bcd"]), np.str_("a\0")],
        "swapped": np.arange(3, dtype=">i4"),
        "strings": np.array(["one", "two"], np.dtypes.StringDType()),
        "time": np.array(["2026-11-21"], "M8[D]"),
        "generator": np.random.Generator(np.random.PCG64(5)),
        "dtypes": {
            name: jnp.asarray([0, 1, 1, 0], name)
            for name in ("bfloat16", "float8_e4m3fn", "float8_e4m3", "int4", "uint4", "int2")
        },
        "zero size": jnp.zeros((0, 3)),
        "weak": jnp.asarray(2.0),
        "large": jnp.arange(5000, dtype=jnp.int16).reshape(50, 100),
    }


def write(path):
    """Writes the checkpoint, with several chunks for its large leaf."""
    options = flaxckpt.Options(chunk_bytes=4096)
    flaxckpt.save(path, tree(), options=options, metadata={"by": flaxckpt.__version__})


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_a_checkpoint_of_each_format_loads(path, tmp_path):
    expected = tree()
    assert flaxckpt.verify(path).problems == ()
    assert_same(expected, flaxckpt.restore(path))
    assert_same(expected, flaxckpt.restore(path, expected))


def test_the_golden_checkpoint_is_what_is_written_today(tmp_path):
    """When this fails, the format has changed: give it a new version."""
    write(tmp_path / "x")
    newest = flaxckpt.source.checkpoint.open_checkpoint(GOLDEN[-1]).tree
    written = flaxckpt.source.checkpoint.open_checkpoint(tmp_path / "x").tree
    assert uncut(written.records) == uncut(newest.records)
    assert written.nodes == newest.nodes


def uncut(records):
    """`records` without the chunks: any grid of them is of the same format."""
    return [r._replace(array=r.array and r.array._replace(chunks=())) for r in records]


def state():
    """What is saved with fewer bits, by `OPTIONS`."""
    return {
        "params": {"kernel": jnp.linspace(-1, 1, 12).reshape(3, 4), "bias": np.arange(4.0)},
        "ema": {"kernel": jnp.linspace(-3, 3, 12).reshape(3, 4)},
        "step": jnp.int32(30),
    }


OPTIONS = flaxckpt.Options(save_dtype={"params/.*": "bfloat16", "ema/.*": "float16"})


def restored_state():
    """What is restored of it without a target."""
    saved = state()
    bias = saved["params"]["bias"].astype(jnp.bfloat16)
    return {
        "params": {"kernel": saved["params"]["kernel"].astype(jnp.bfloat16), "bias": bias},
        "ema": {"kernel": saved["ema"]["kernel"].astype(jnp.float16)},
        "step": saved["step"],
    }


class Counter:
    """An iterator with `get_state` and `set_state`, as those of grain."""

    at = 0

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


def items():
    """One of each kind that needs nothing but numpy and jax."""
    counter = Counter()
    counter.at = 7
    generator = np.random.default_rng(5)
    generator.normal(size=3)
    return {
        "config": {"layers": [12, None, True, 0.1, "\u00e9"], "nested": {"": {}}},
        "stats": {"mean": np.arange(3.0), "count": (jnp.int32(4), 5)},
        "rng": generator,
        "old_rng": np.random.RandomState(6),
        "key": jax.random.wrap_key_data(jnp.arange(2, dtype=jnp.uint32), impl="threefry2x32"),
        "data": counter,
    }


def write_run(path):
    """Writes a run, of which only the newest step is kept; it remembers the others."""
    keep = flaxckpt.Keep(last=1)
    with flaxckpt.CheckpointManager(path, keep=keep, options=OPTIONS) as ckpt:
        for step in (*GONE, KEPT):
            ckpt.save(step, state(), metrics={"loss": step / 8}, items=items())
            ckpt.wait()
        ckpt.pin(KEPT)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_a_run_of_each_format_loads(path):
    assert flaxckpt.verify(path / str(KEPT), strict=True).problems == ()
    ckpt = flaxckpt.CheckpointManager(path, read_only=True)
    assert ckpt.steps() == [KEPT]
    assert_same(restored_state(), ckpt.restore())
    # The target of a loop has the wider floats.
    widened = jax.tree.map(lambda wide, narrow: narrow.astype(wide.dtype), state(), ckpt.restore())
    assert_same(widened, ckpt.restore(state(), dtype="widen"))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_the_items_of_a_run_of_each_format_load(path):
    expected, counter = items(), Counter()
    targets = dict.fromkeys(expected) | {"data": counter}
    found = flaxckpt.restore_items(path / str(KEPT), targets)
    assert found["data"] is counter
    assert counter.at == expected.pop("data").at
    assert found.pop("data").at == 7
    for name in ("rng", "old_rng"):
        assert list(found.pop(name).bytes(9)) == list(expected.pop(name).bytes(9))
    assert_same(expected, found)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_a_run_of_each_format_remembers_its_saves(path):
    saves = history(Run(at(path)))
    assert [save.step for save in saves] == [*GONE, KEPT]
    assert [dict(save.metrics) for save in saves] == [{"loss": s / 8} for s in (*GONE, KEPT)]
    assert {(save.leaves, save.nbytes) for save in saves} == {(4, 60)}
    assert all(save.seconds > 0 and save.time > 1.7e9 for save in saves)


def test_the_golden_run_is_what_is_written_today(tmp_path):
    """When this fails, the format has changed: give it a new version."""
    write_run(tmp_path / "x")
    (newest, written) = (
        flaxckpt.source.checkpoint.open_checkpoint(path / str(KEPT))
        for path in (RUNS[-1], tmp_path / "x")
    )
    assert uncut(written.tree.records) == uncut(newest.tree.records)
    assert written.tree.nodes == newest.tree.nodes
    assert kinds(written) == kinds(newest)


def kinds(checkpoint):
    """How the items are stored, but for their checksums: a tree has the id of its save in it."""
    return {
        name: (item.kind, set(item.files), item.tree, item.details)
        for name, item in checkpoint.described.items.items()
    }


if __name__ == "__main__":
    shutil.rmtree(sys.argv[2], ignore_errors=True)
    {"checkpoint": write, "run": write_run}[sys.argv[1]](sys.argv[2])
