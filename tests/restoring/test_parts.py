"""Restoring a part of a checkpoint: a subtree, or the leaves that patterns select."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import flaxckpt
from flaxckpt.errors import RuleError, StructureMismatchError
from flaxckpt.tree.structure import flatten
from tests.reads import Reads
from tests.trees import abstract, assert_same


class Pair(NamedTuple):
    first: Any
    second: Any


flaxckpt.register_node(Pair)

PARAMS = {
    "dense_0": {"bias": jnp.zeros(3), "kernel": jnp.ones((2, 3))},
    "dense_1": {"bias": jnp.ones(1, jnp.bfloat16), "kernel": jnp.full((3, 1), 2.0)},
}
TREE = {
    "params": PARAMS,
    "opt_state": optax.adamw(1e-3).init(PARAMS),
    "pair": Pair([1, (2.5, "text")], {"a.b": np.arange(3), "0": None, "": b"x"}),
    "boxed": {"w": nn.Partitioned(jnp.ones((2, 2)), names=("x", None)), "empty": ()},
    "keys": jax.random.split(jax.random.key(0)),
    "step": 7,
}
NODES = {
    "": TREE,
    "params": TREE["params"],
    "params/dense_0": TREE["params"]["dense_0"],
    "params/dense_1/bias": TREE["params"]["dense_1"]["bias"],
    "opt_state": TREE["opt_state"],
    "opt_state/0": TREE["opt_state"][0],
    "opt_state/0/mu": TREE["opt_state"][0].mu,
    "opt_state/0/count": TREE["opt_state"][0].count,
    "opt_state/1": TREE["opt_state"][1],
    "pair": TREE["pair"],
    "pair/first/1": TREE["pair"].first[1],
    "pair/first/1/1": "text",
    "pair/second": TREE["pair"].second,
    "pair/second/a.b": TREE["pair"].second["a.b"],
    "pair/second/%30": None,
    "pair/second/%": b"x",
    "boxed": TREE["boxed"],
    "boxed/w": TREE["boxed"]["w"],
    "boxed/empty": (),
    "keys": TREE["keys"],
    "step": 7,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("parts") / "x"
    flaxckpt.save(path, TREE)
    return path


# A subtree


@pytest.mark.parametrize("name", NODES)
def test_a_subtree_comes_back_with_its_containers(saved, name):
    assert_same(flaxckpt.restore(saved, only=name), NODES[name])


@pytest.mark.parametrize("name", [name for name, node in NODES.items() if node is not None])
def test_the_target_is_like_the_subtree(saved, name):
    for target in (NODES[name], abstract(NODES[name])):
        assert_same(flaxckpt.restore(saved, target, only=name), NODES[name])


def test_a_slash_at_the_end_means_the_same(saved):
    assert flaxckpt.restore(saved, only="pair/first/")[1][1] == "text"
    assert flaxckpt.restore(saved, only=["pair/first/"])["pair"]["first"][1][1] == "text"


def test_a_name_that_begins_like_another_is_not_that(tmp_path):
    tree = {"ab": 1, "a": {"b": 2}, "a.c": 3, "abc": {"b": 4}}
    flaxckpt.save(tmp_path / "x", tree)
    assert flaxckpt.restore(tmp_path / "x", only="a") == {"b": 2}
    assert flaxckpt.restore(tmp_path / "x", only=["a"]) == {"a": {"b": 2}}
    assert flaxckpt.restore(tmp_path / "x", only="abc") == {"b": 4}


def test_a_target_that_is_not_like_the_subtree(saved):
    with pytest.raises(StructureMismatchError) as raised:
        flaxckpt.restore(saved, {"params": PARAMS}, only="params")
    assert {m.problem for m in raised.value.mismatches} == {"missing", "unexpected"}
    names = {m.name for m in raised.value.mismatches}
    assert {"params/dense_0/bias", "dense_0/bias"} <= names


def test_as_numpy(saved):
    restored = flaxckpt.restore(saved, only="params/dense_0", as_numpy=True)
    assert isinstance(restored["kernel"], np.ndarray)


def test_a_subtree_with_rules(saved):
    """Key paths begin at the root of the subtree."""
    rule = flaxckpt.Rename("dense_0/(.*)", r"first/\1")
    restored = flaxckpt.restore(saved, only="params", transforms=[rule])
    assert sorted(restored) == ["dense_1", "first"]
    restored = flaxckpt.restore(saved, PARAMS["dense_0"], only="params", transforms=[
        flaxckpt.Drop("dense_1/.*"), flaxckpt.Rename("dense_0/(.*)", r"\1")])  # fmt: skip
    assert_same(restored, PARAMS["dense_0"])


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.Dense(3)(x))


@pytest.fixture(scope="module")
def train_state():
    params = Net().init(jax.random.key(0), jnp.ones((1, 4)))["params"]
    state = TrainState.create(apply_fn=Net().apply, params=params, tx=optax.adamw(1e-3))
    return state.replace(step=3)


def test_parts_of_a_train_state(train_state, tmp_path):
    flaxckpt.save(tmp_path / "x", {"epoch": 2, "state": train_state})
    assert_same(flaxckpt.restore(tmp_path / "x", only="state/params"), train_state.params)
    assert_same(flaxckpt.restore(tmp_path / "x", only="state/opt_state"), train_state.opt_state)
    fresh = train_state.replace(step=0, params=jax.tree.map(jnp.zeros_like, train_state.params))
    restored = flaxckpt.restore(tmp_path / "x", fresh, only="state")
    assert isinstance(restored, TrainState)
    assert_same(restored, train_state)
    node = flaxckpt.restore(tmp_path / "x", only="state")
    assert node.class_name.endswith("TrainState")
    assert_same(node["params"], train_state.params)


def test_parts_of_a_train_state_that_is_the_target(train_state, tmp_path):
    flaxckpt.save(tmp_path / "x", train_state)
    fresh = train_state.replace(step=0, params=jax.tree.map(jnp.zeros_like, train_state.params))
    restored = flaxckpt.restore(tmp_path / "x", fresh, only="params/.*")
    assert isinstance(restored, TrainState)
    assert restored.step == 0
    assert_same(restored.params, train_state.params)
    for ours, theirs in zip(
        *map(jax.tree.leaves, (restored.opt_state, fresh.opt_state)), strict=True
    ):
        assert ours is theirs


def test_one_model_of_several_nnx_objects(tmp_path):
    def models(seed):
        model = nnx.Linear(2, 3, rngs=nnx.Rngs(seed))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    model, optimizer = models(0)
    flaxckpt.save(tmp_path / "x", {"model": model, "optimizer": optimizer})
    other, _ = models(1)
    assert (other.kernel[...] != model.kernel[...]).any()
    restored = flaxckpt.restore(tmp_path / "x", other, only="model")
    assert isinstance(restored, nnx.Linear)
    assert (restored.kernel[...] == model.kernel[...]).all()
    state = flaxckpt.restore(tmp_path / "x", only="model")
    assert_same(state, nnx.state(model))


# Leaves


def test_leaves_without_a_target_are_dicts_of_dicts(saved):
    restored = flaxckpt.restore(saved, only="params/.*/bias")

    biases = {name: {"bias": layer["bias"]} for name, layer in PARAMS.items()}
    assert_same(restored, {"params": biases})
    assert flaxckpt.restore(saved, only="ste.") == {"step": 7}
    assert flaxckpt.restore(saved, only="pair/.*/1/.*") == {
        "pair": {"first": {1: {0: 2.5, 1: "text"}}}
    }


@pytest.mark.parametrize(
    ("only", "names"),
    [
        (["step", "params/dense_0"], {"step", "params/dense_0/bias", "params/dense_0/kernel"}),
        ((".*/count", "ste."), {"opt_state/0/count", "step"}),
        (["params/.*/kernel"], {"params/dense_0/kernel", "params/dense_1/kernel"}),
        (lambda name: name.endswith("/1"), {"pair/first/1/1"}),
        (["pair/second/a.b", "nothing"], {"pair/second/a.b"}),
        ("pair/second/%.?", {"pair/second/%"}),
    ],
)
def test_lists_and_predicates(saved, only, names):
    restored = flaxckpt.restore(saved, only=only)
    assert set(flatten(restored).names) == names


def test_the_rest_of_a_target_is_left_as_it_is(saved):
    target = {
        "params": jax.tree.map(jnp.zeros_like, PARAMS),
        "step": 0,
        "mine": {"w": np.ones(3), "abstract": jax.ShapeDtypeStruct((2,), jnp.float32)},
        "box": nn.Partitioned(jnp.zeros(1), names=("x",)),
    }
    restored = flaxckpt.restore(saved, target, only=["params/.*/kernel", "step"])
    assert jax.tree.structure(restored) == jax.tree.structure(target)
    assert restored["step"] == 7
    for name, layer in PARAMS.items():
        assert (restored["params"][name]["kernel"] == layer["kernel"]).all()
        assert restored["params"][name]["bias"] is target["params"][name]["bias"]
    assert restored["mine"]["w"] is target["mine"]["w"]
    assert restored["mine"]["abstract"] is target["mine"]["abstract"]
    assert restored["box"].value is target["box"].value


def test_the_rest_of_the_checkpoint_is_not_unexpected_and_what_is_selected_is(saved):
    target = {"params": {"dense_0": PARAMS["dense_0"]}, "step": 0}
    assert flaxckpt.restore(saved, target, only="st.*")["step"] == 7
    with pytest.raises(StructureMismatchError) as raised:
        flaxckpt.restore(saved, target, only=["params"])
    assert [(m.problem, m.name) for m in raised.value.mismatches] == [
        ("unexpected", "params/dense_1/bias"),
        ("unexpected", "params/dense_1/kernel"),
    ]
    restored = flaxckpt.restore(saved, target, only=["params"], unexpected="ignore")
    assert_same(restored["params"], target["params"])
    assert restored["step"] == 0


def test_what_is_selected_of_the_target_and_not_there_is_missing(saved):
    target = {"params": PARAMS | {"dense_2": {"bias": jnp.ones(1)}}, "step": 0}
    with pytest.raises(StructureMismatchError) as raised:
        flaxckpt.restore(saved, target, only="params/.*")
    assert [(m.problem, m.name) for m in raised.value.mismatches] == [
        ("missing", "params/dense_2/bias")
    ]
    restored = flaxckpt.restore(saved, target, only="params/.*", missing="init")
    assert restored["params"]["dense_2"]["bias"] is target["params"]["dense_2"]["bias"]


# Nothing


def told(saved, only, target=None):
    with pytest.raises(RuleError) as raised:
        flaxckpt.restore(saved, target, only=only)
    return str(raised.value)


@pytest.mark.parametrize("target", [None, PARAMS])
def test_a_path_that_is_not_there(saved, target):
    assert told(saved, "parms/dense_0", target) == (
        f"only='parms/dense_0' selects nothing of the checkpoint at {saved}. It has "
        "params/dense_0, params/dense_1, params/dense_0/bias. Correct the path."
    )


def test_a_path_that_is_like_none(saved):
    top = "boxed, keys, opt_state, pair, params, step"
    for only in ("zzzzzz", "zzzz/.*", ["zzzz", "yyyy/.*"], []):
        assert told(saved, only) == (
            f"only={only!r} selects nothing of the checkpoint at {saved}. It has {top}. "
            "Correct the path."
        )

    def nothing(name):
        return False

    assert told(saved, nothing).startswith(f"only={nothing!r} selects nothing")


def test_of_an_empty_tree(tmp_path):
    flaxckpt.save(tmp_path / "x", {})
    assert told(tmp_path / "x", "a") == (
        f"only='a' selects nothing of the checkpoint at {tmp_path / 'x'}. It has no leaves. "
        "Correct the path."
    )
    assert told(tmp_path / "x", []).startswith("only=[] selects nothing")


def test_an_empty_list_selects_nothing_of_a_leaf_alone(tmp_path):
    flaxckpt.save(tmp_path / "x", 7)
    assert told(tmp_path / "x", []).startswith("only=[] selects nothing")


# What is read


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Parameters of 1.3 MB, none so small that it lies in the index, and two moments of each."""
    path = tmp_path_factory.mktemp("large") / "x"
    params = {
        **{f"layer_{i}": {"bias": jnp.full(2000, i), "kernel": jnp.full((100, 200), float(i))}
           for i in range(10)},
        "embedding": jnp.ones((2000, 50)),
    }  # fmt: skip
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    tree = {"opt_state": optax.adamw(1e-3).init(params), "params": params, "step": jnp.int32(1)}
    flaxckpt.save(path, tree)
    return path, tree


def nbytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_a_whole_restore_reads_the_whole(large, monkeypatch):
    """The control: what is counted below is all there is."""
    path, tree = large
    read = Reads(monkeypatch).of(lambda: flaxckpt.restore(path))
    assert nbytes(tree) <= read < 1.05 * nbytes(tree)


def rest(tree):
    return {**tree, "params": jax.tree.map(jnp.zeros_like, tree["params"])}


def extended(tree):
    return {"params": tree["params"] | {"head": jnp.zeros((50, 50))}}


@pytest.mark.parametrize(
    ("target", "how"),
    [
        (None, {"only": "params"}),
        (None, {"only": "params/.*"}),
        (None, {"only": ["params"]}),
        (None, {"only": lambda name: name.startswith("params/")}),
        (None, {"transforms": [flaxckpt.Drop("[^p].*")]}),
        (lambda tree: tree["params"], {"only": "params"}),
        (lambda tree: abstract(tree["params"]), {"only": "params"}),
        (rest, {"only": ["params"]}),
        (lambda tree: {"params": tree["params"]}, {"unexpected": "ignore"}),
        (lambda tree: {"params": tree["params"]}, {"unexpected": {"opt_state/.*|step": "ignore"}}),
        (extended, {"unexpected": "ignore", "missing": "init"}),
        (extended, {"only": "params/.*", "missing": {"params/head": "init"}}),
        (lambda tree: {**rest(tree), "step": jnp.int32(0)}, {"opt_state": "reset"}),
    ],
)
def test_parameters_alone_are_a_third_of_the_bytes(large, monkeypatch, target, how):
    path, tree = large
    wanted = None if target is None else target(tree)
    reads = Reads(monkeypatch)
    restored = flaxckpt.restore(path, wanted, **how)
    assert nbytes(tree["params"]) <= reads.nbytes < 1.05 * nbytes(tree["params"])
    assert reads.nbytes <= 1.05 * nbytes(tree) / 3
    params = restored.get("params", restored)
    params = {name: leaf for name, leaf in params.items() if name != "head"}
    assert_same(params, tree["params"])


@pytest.mark.parametrize("pattern", ["params/layer_[37]/kernel", None])
def test_some_leaves_are_their_share_of_the_bytes(large, monkeypatch, pattern):
    path, tree = large
    names = {f"params/layer_{i}/kernel" for i in (3, 7)}
    how = {"only": names.__contains__}
    if pattern is not None:
        keep = flaxckpt.Rename(f"({pattern})", r"kept/\1")
        how = {"transforms": [keep, flaxckpt.Drop("params/.*|opt_state/.*|step")]}
    read = Reads(monkeypatch).of(lambda: flaxckpt.restore(path, **how))
    wanted = 2 * tree["params"]["layer_3"]["kernel"].nbytes
    assert wanted <= read < 1.05 * wanted
