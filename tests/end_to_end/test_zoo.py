"""All states of the zoo come back exactly: with a concrete target, an abstract one, and none."""

import jax
import pytest
from flax import nnx

import flaxckpt
from tests import zoo
from tests.trees import abstract, assert_same, nodes

# Classes that no data can rebuild: static fields, or the user's own without `register_node`.
MAPPINGS = {
    "TrainState", "TS", "GraphDef", "DynamicScale", "M", "FromOutput", "S", "Inner", "H"
}  # fmt: skip


@pytest.fixture(params=sorted(zoo.BUILD))
def state(request):
    return zoo.BUILD[request.param]()


def test_with_a_concrete_target(state, tmp_path):
    flaxckpt.save(tmp_path / "x", state)
    restored = flaxckpt.restore(tmp_path / "x", state)
    assert_same(state, restored)
    if not isinstance(state, nnx.Module):  # nnx itself makes unequal treedefs of equal modules
        assert jax.tree.structure(restored) == jax.tree.structure(state)


def test_with_an_abstract_target(state, tmp_path):
    flaxckpt.save(tmp_path / "x", state)
    assert_same(state, flaxckpt.restore(tmp_path / "x", abstract(state)))


def test_without_a_target(state, tmp_path):
    flaxckpt.save(tmp_path / "x", state)
    restored = flaxckpt.restore(tmp_path / "x")
    saved_nodes, restored_nodes = nodes(state), nodes(restored)
    assert [n and tuple(k.value for k in n.keys) for n in saved_nodes] == [
        n and tuple(k.value for k in n.keys) for n in restored_nodes
    ]
    for saved, found in zip(saved_nodes, restored_nodes, strict=True):
        if saved and saved.class_name.rpartition(".")[2] in MAPPINGS:
            assert found.class_name.endswith("SavedNode")
        else:
            assert found == saved


def test_without_a_target_every_leaf_is_exact(state, tmp_path):
    flaxckpt.save(tmp_path / "x", state)
    from flaxckpt.testing import differences

    assert differences(state, flaxckpt.restore(tmp_path / "x")) == []


def test_every_state_verifies(state, tmp_path):
    flaxckpt.save(tmp_path / "x", state)
    assert flaxckpt.verify(tmp_path / "x").problems == ()


def test_the_mapping_says_what_it_was(tmp_path):
    flaxckpt.save(tmp_path / "x", zoo.BUILD["linen_adamw"]())
    restored = flaxckpt.restore(tmp_path / "x")
    assert restored.class_name == "flax.training.train_state.TrainState"
    assert set(restored.static) == {"apply_fn", "tx"}
    assert list(restored) == ["step", "params", "opt_state"]


def test_a_module_without_a_target_is_its_state(tmp_path):
    flaxckpt.save(tmp_path / "x", zoo.BUILD["nnx_module_direct"]())
    assert isinstance(flaxckpt.restore(tmp_path / "x"), nnx.State)


def test_tied_weights_stay_tied(tmp_path):
    linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    model = nnx.Sequential(linear, linear)
    flaxckpt.save(tmp_path / "x", model)
    restored = flaxckpt.restore(tmp_path / "x", model)
    assert restored.layers[0].kernel is restored.layers[1].kernel
    assert restored.layers[0].kernel is not model.layers[0].kernel


def test_there_are_45_states():
    assert len(zoo.BUILD) == 45
