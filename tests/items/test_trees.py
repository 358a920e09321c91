"""Items that are trees have all that the state has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import flaxckpt
from flaxckpt.errors import CorruptCheckpointError, StructureMismatchError, UnsupportedLeafError
from flaxckpt.testing import differences
from tests.items.helpers import again, saved


def tree():
    return {
        "w": jnp.arange(6.0).reshape(2, 3),
        "half": jnp.ones(3, jnp.bfloat16),
        "key": jax.random.key(3, impl="rbg"),
        "host": np.arange(4),
        "more": (1, 2.5, "text", b"\x00", None),
    }


def test_a_tree_comes_back_with_and_without_a_target(tmp_path):
    for target in (None, jax.eval_shape(lambda: {"w": jnp.zeros(3)}) and tree()):
        assert differences(again(tmp_path / "x", tree(), target), tree()) == []


def test_a_tree_is_restored_onto_another_mesh(tmp_path):
    mesh = Mesh(np.array(jax.devices()), "x")
    rows, columns = (NamedSharding(mesh, PartitionSpec(*s)) for s in [("x",), (None, "x")])
    value = jax.device_put(np.arange(64.0, dtype=np.float32).reshape(8, 8), rows)
    target = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=columns)
    found = again(tmp_path / "x", {"a": value}, {"a": target})["a"]
    assert found.sharding == columns
    assert (found == value).all()


@pytest.mark.parametrize(
    "value", [np.arange(3.0), np.float32(2), b"bytes", jnp.ones((2, 2)), np.array(["a", "b"]), ()]
)
def test_one_leaf_is_a_tree(tmp_path, value):
    assert differences(again(tmp_path / "x", value), value) == []


def test_an_nnx_module_is_a_tree(tmp_path):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    found = again(tmp_path / "x", model, nnx.Linear(2, 3, rngs=nnx.Rngs(1)))
    assert (found.kernel[...] == model.kernel[...]).all()


def test_a_target_that_does_not_fit_lists_the_leaves(tmp_path):
    with pytest.raises(StructureMismatchError, match="missing +b"):
        again(tmp_path / "x", {"a": np.ones(2)}, {"a": np.ones(2), "b": 1})


def test_a_leaf_that_no_checkpoint_holds_is_named_before_anything_is_written(tmp_path):
    with pytest.raises(UnsupportedLeafError, match="the item ema: the leaf a/b is a .*object"):
        saved(tmp_path / "x", ema={"a": {"b": object()}})
    assert list(tmp_path.iterdir()) == []


def test_damage_is_found_by_restore_and_by_verify(tmp_path):
    path = saved(tmp_path / "x", ema={"a": np.arange(5000.0)}, good={"a": np.ones(3)})
    (data,) = (path / "ema" / "d").iterdir()
    whole = data.read_bytes()
    data.write_bytes(whole[:200] + bytes([whole[200] ^ 1]) + whole[201:])
    with pytest.raises(CorruptCheckpointError, match="leaf a"):
        flaxckpt.restore_items(path, {"ema": None})
    (problem,) = flaxckpt.verify(path).problems
    assert problem.startswith("in ema: ")
    assert "leaf a" in problem
    assert flaxckpt.restore_items(path, {"good": None})["good"]["a"].sum() == 3


@pytest.mark.parametrize("name", ["_METADATA", "manifest.ocdbt", "_sharding"])
def test_a_file_that_is_gone_or_new_is_listed(tmp_path, name):
    path = saved(tmp_path / "x", ema={"a": jnp.arange(500.0)})
    (path / "ema" / "stray").write_text("x")
    problems = flaxckpt.verify(path).problems
    assert problems == (f"the file {path}/ema/stray does not belong to the checkpoint",)
    (path / "ema" / "stray").unlink()
    (path / "ema" / name).unlink()
    assert any(f"ema/{name} is missing" in line for line in flaxckpt.verify(path).problems)


def test_trees_of_two_saves_are_no_item(tmp_path):
    a, b = (saved(tmp_path / name, ema={"a": np.arange(5.0)}) for name in "ab")
    (a / "ema").rename(tmp_path / "aside")
    (b / "ema").rename(a / "ema")
    with pytest.raises(CorruptCheckpointError, match="of two different saves"):
        flaxckpt.restore_items(a, {"ema": None})
    assert any("the item ema: " in line for line in flaxckpt.verify(a).problems)


def test_a_report_counts_the_leaves_of_all_trees(tmp_path):
    report = flaxckpt.verify(saved(tmp_path / "x", ema={"a": np.ones(4), "b": np.ones(4)}))
    assert (report.leaves, report.nbytes) == (3, 72)
