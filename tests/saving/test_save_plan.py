"""A plan serves every state of its kind, and none of another."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt import errors
from flaxckpt.saving.save_plan import plan_tree
from tests.trees import assert_same

CHUNK = 1 << 20


@struct.dataclass
class Trained:
    """A state with something that is no leaf."""

    w: jax.Array
    name: str = struct.field(pytree_node=False)


def on_mesh(array, *spec):
    """`array` on eight devices."""
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def weak(number):
    """An array with a weak type."""
    array = jnp.asarray(number)
    assert array.weak_type
    return array


def drawn(times):
    """A generator that has given so many numbers."""
    generator = np.random.default_rng(0)
    generator.random(times)
    return generator


# Each is a kind of its own; the second member has other values.
KINDS = {
    "jax": (jnp.arange(8.0), jnp.ones(8)),
    "numpy": (np.arange(8.0, dtype=np.float32), np.ones(8, np.float32)),
    "another dtype": (jnp.arange(8), jnp.zeros(8, jnp.int32)),
    "another byte order": (np.arange(8.0).astype(">f4"), np.ones(8, ">f4")),
    "another shape": (jnp.arange(8.0).reshape(2, 4), jnp.ones((2, 4))),
    "of one more axis": (jnp.arange(8.0)[None], jnp.ones((1, 8))),
    "sharded": (on_mesh(jnp.arange(8.0), "x"), on_mesh(jnp.ones(8), "x")),
    "sharded otherwise": (on_mesh(jnp.arange(8.0), "y"), on_mesh(jnp.ones(8), "y")),
    "replicated": (on_mesh(jnp.arange(8.0)), on_mesh(jnp.ones(8))),
    "on another device": tuple(jax.device_put(jnp.ones(8) * n, jax.devices()[3]) for n in (1, 2)),
    "strong number": (jnp.float32(1), jnp.float32(2)),
    "weak number": (weak(1.0), weak(2.0)),
    "numpy scalar": (np.float32(1), np.float32(2)),
    "key": (jax.random.key(0), jax.random.key(1)),
    "key of another kind": (jax.random.key(0, impl="rbg"), jax.random.key(1, impl="rbg")),
    "float": (1.0, 2.0),
    "dict": ({"a": jnp.ones(2)}, {"a": jnp.zeros(2)}),
    "another dict": ({"b": jnp.ones(2)}, {"b": jnp.zeros(2)}),
    "list": ([jnp.ones(2)], [jnp.zeros(2)]),
    "tuple": ((jnp.ones(2),), (jnp.zeros(2),)),
    "static field": (Trained(jnp.ones(2), "a"), Trained(jnp.zeros(2), "a")),
    "another static field": (Trained(jnp.ones(2), "b"), Trained(jnp.zeros(2), "b")),
    "nothing": (None, None),
    "empty": ((), ()),
    "bool": (True, False),
    "int": (1, 2),
    # What is JSON is part of its plan.
    "huge int": (2**70, 2**70),
    "another huge int": (2**71, 2**71),
    "text": ("1", "1"),
    "another text": ("2", "2"),
    "bytes": (b"1", b"1"),
    "strings": (np.array(["a", "b"]), np.array(["c", "d"])),
    "generator": (drawn(0), drawn(0)),
    "generator in another state": (drawn(1), drawn(1)),
    "another generator": tuple(np.random.Generator(np.random.MT19937(0)) for _ in range(2)),
}
PAIRS = list(itertools.permutations(KINDS, 2))


def tree(leaf):
    """A state around a leaf."""
    return {"before": jnp.ones(3), "leaf": leaf, "after": np.zeros(2)}


@pytest.fixture(scope="module")
def plans():
    """The plan of each kind."""
    return {kind: plan_tree(tree(leaf), CHUNK).plan for kind, (leaf, _) in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_is_used_again_for_a_state_of_its_kind(kind, plans):
    state = plan_tree(tree(KINDS[kind][1]), CHUNK, plans[kind])
    assert state.plan is plans[kind]
    fresh = plan_tree(tree(KINDS[kind][1]), CHUNK)
    for array, other in zip(state.data, fresh.data, strict=True):
        assert np.asarray(array).tobytes() == np.asarray(other).tobytes()


def test_a_plan_serves_no_other_kind(plans):
    wrong = [
        (kind, other)
        for kind, other in PAIRS
        if plan_tree(tree(KINDS[other][0]), CHUNK, plans[kind]).plan is plans[kind]
    ]
    assert wrong == []


def test_a_plan_does_not_keep_the_leaves():
    import gc
    import weakref

    array = np.arange(5.0)
    gone = weakref.ref(array)
    plan = plan_tree({"w": array}, CHUNK).plan
    del array
    gc.collect()
    assert gone() is None
    assert plan.records[0].name == "w"


@pytest.mark.parametrize("make", [lambda: jnp.ones(8), lambda: jax.random.key(0)])
@pytest.mark.parametrize("known", [False, True], ids=["a new plan", "a known one"])
def test_a_deleted_leaf_is_an_error_with_its_name(make, known):
    tree = {"a": jnp.ones(3), "params": [make(), make()]}
    plan = plan_tree(tree, CHUNK).plan if known else None
    tree["params"][1].delete()
    with pytest.raises(errors.UnsupportedLeafError) as raised:
        plan_tree(tree, CHUNK, plan)
    assert str(raised.value).startswith("the leaf params/1: its buffer was deleted")


def test_a_donated_leaf_is_an_error_in_a_run(tmp_path):
    step = jax.jit(lambda state: {"w": state["w"] + 1}, donate_argnums=0)
    state = {"w": jnp.arange(1000.0)}
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        ckpt.save(0, state, wait=True)
        after = step(state)
        with pytest.raises(errors.UnsupportedLeafError, match="the leaf w: its buffer was deleted"):
            ckpt.save(1, state)
        ckpt.save(1, after)
    assert ckpt.steps() == [0, 1]
    assert_same(ckpt.restore(step=1), after)


@pytest.mark.parametrize("async_", [True, False])
def test_saves_of_alternating_kinds_restore_exactly(tmp_path, async_):
    kinds = [*KINDS, *reversed(KINDS)]
    options = flaxckpt.Options(fsync=False)
    run = tmp_path / "run"
    with flaxckpt.CheckpointManager(run, async_=async_, options=options) as ckpt:
        for i, kind in enumerate(kinds):
            for j in (0, 1):
                ckpt.save(2 * i + j, tree(KINDS[kind][j]))
    for i, kind in enumerate(kinds):
        for j in (0, 1):
            expected = tree(KINDS[kind][j])
            assert_same(ckpt.restore(expected, step=2 * i + j), expected)
            restored = ckpt.restore(step=2 * i + j)
            assert flaxckpt.testing.differences(restored, expected) == [], kind


def test_a_model_that_grew_is_saved_whole(tmp_path):
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        for step, width in enumerate((2, 2, 3, 2)):
            model = nnx.Linear(width, width, rngs=nnx.Rngs(step))
            ckpt.save(step, model)
            assert flaxckpt.testing.differences(ckpt.restore(model, step=step), model) == []


@pytest.mark.parametrize("keys", [(1, True), (0, False), (1, 1.0)])
def test_keys_that_are_equal_but_not_the_same_come_back_as_they_were(keys, tmp_path):
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        for step, key in enumerate(keys):
            ckpt.save(step, {key: np.ones(1)})
            assert list(map(repr, ckpt.restore(step=step))) == [repr(key)]
