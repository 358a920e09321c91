"""A checkpoint that was written by any released version loads for ever.

`tests/golden/format_1` was written by `write(...)` below, with version 0.1.0. A new format gets a
new directory; those that are there are never written again.
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
from tests.trees import assert_same

GOLDEN = sorted((Path(__file__).parent / "golden").iterdir())


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
    newest = flaxckpt.checkpoint.open_checkpoint(GOLDEN[-1]).tree
    written = flaxckpt.checkpoint.open_checkpoint(tmp_path / "x").tree
    assert uncut(written.records) == uncut(newest.records)
    assert written.nodes == newest.nodes


def uncut(records):
    """`records` without the chunks: any grid of them is of the same format."""
    return [r._replace(array=r.array and r.array._replace(chunks=())) for r in records]


if __name__ == "__main__":
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    write(sys.argv[1])
