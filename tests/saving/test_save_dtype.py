"""Floats that are saved with fewer bits than the state has, and everything else as it is."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt import Options, errors
from flaxckpt.saving import save_plan
from tests.trees import assert_same


def saving(dtype, **settings):
    return Options(fsync=False, save_dtype=dtype, **settings)


def saved(path, tree, dtype, **how):
    """What is restored of `tree` when it was saved with `dtype`."""
    flaxckpt.save(path, tree, options=saving(dtype), **how)
    assert flaxckpt.verify(path, strict=True).problems == ()
    return flaxckpt.restore(path)


def dtypes(tree):
    """The names of the dtypes of a dict of arrays."""
    return {name: str(array.dtype) for name, array in tree.items()}


FLOATS = {
    "jax": jnp.linspace(0, 1, 9),
    "numpy": np.linspace(0, 1, 9, dtype=np.float32),
    "double": np.linspace(0, 1, 9),
    "swapped": np.linspace(0, 1, 9).astype(">f4"),
    "no axes": jnp.float32(0.1),
    "empty": np.zeros((0, 3), np.float32),
    "numpy without axes": np.array(0.1),
}
OTHERS = {
    "int": jnp.arange(3),
    "unsigned": np.arange(3, dtype=np.uint8),
    "int4": jnp.arange(3, dtype=jnp.int4),
    "bool": np.array([True, False]),
    "complex": np.ones(2, np.complex64),
    "key": jax.random.key(1),
    "keys": jax.random.split(jax.random.key(2, impl="rbg"), 3),
    "old key": jax.random.PRNGKey(3),
    "strings": np.array(["a", "b"]),
    "dates": np.array(["2020-01-01"], "M8[D]"),
    "python": [1, 0.1, True, "text", b"x", 1j, None, 2**70],
    "numpy scalars": [np.float32(0.1), np.float64(0.1), np.int8(3)],
    "generator": np.random.default_rng(0),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_all_floats_are_saved_with_one_dtype(dtype, tmp_path):
    restored = saved(tmp_path / "x", FLOATS, dtype)
    assert set(dtypes(restored).values()) == {dtype}
    for name, array in FLOATS.items():
        assert isinstance(restored[name], jax.Array) == isinstance(array, jax.Array)
        expected = np.asarray(array).astype(jnp.dtype(dtype))
        np.testing.assert_array_equal(np.asarray(restored[name]), expected, strict=True)


def test_everything_else_stays_as_it_is(tmp_path):
    expected = OTHERS | {"generator": np.random.default_rng(0)}
    assert_same(saved(tmp_path / "x", OTHERS, "bfloat16"), expected)
    assert_same(saved(tmp_path / "y", OTHERS, {".*": "float16"}), expected)


def test_the_state_itself_is_not_changed(tmp_path):
    tree = {"jax": jnp.ones(3), "numpy": np.ones(3)}
    leaves = jax.tree.leaves(tree)
    saved(tmp_path / "x", tree, "bfloat16")
    assert all(a is b for a, b in zip(jax.tree.leaves(tree), leaves, strict=True))
    assert dtypes(tree) == {"jax": "float32", "numpy": "float64"}


NARROW = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float4_e2m1fn", "float6_e2m3fn"]


@pytest.mark.parametrize("name", NARROW)
def test_what_has_fewer_bits_already_is_not_widened(name, tmp_path):
    """Or a restore to its old dtype would have to narrow it, which `widen` refuses."""
    tree = {"x": np.ones(3, getattr(ml_dtypes, name)), "w": np.ones(3, np.float32)}
    restored = saved(tmp_path / "x", tree, "bfloat16")
    assert dtypes(restored) == {"x": name, "w": "bfloat16"}
    assert_same(flaxckpt.restore(tmp_path / "x", tree, dtype="widen"), tree)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_has_the_dtype_already_is_the_same_to_the_bit(dtype, tmp_path):
    tree = {"jax": jnp.ones(3, dtype), "numpy": np.ones(3, jnp.dtype(dtype))}
    assert_same(saved(tmp_path / "x", tree, dtype), tree)


def test_a_weak_type_is_no_dtype(tmp_path):
    weak = jnp.asarray(0.5)
    assert weak.weak_type
    restored = saved(tmp_path / "x", {"x": weak}, "float32")
    assert restored["x"].weak_type
    saved(tmp_path / "y", {"x": weak}, "bfloat16")
    back = flaxckpt.restore(tmp_path / "y", {"x": weak}, dtype="widen")["x"]
    assert (back.dtype, back.weak_type) == (jnp.float32, True)


# Patterns


def test_dtypes_by_pattern_and_the_first_that_matches_counts(tmp_path):
    tree = {"params": {"w": jnp.ones(3), "norm": jnp.ones(3)}, "mu": {"w": jnp.ones(3)}}
    tree["step"] = jnp.arange(2)
    wanted = {
        "params/norm": "float32",
        "params/.*": "bfloat16",
        ".*/w": "float16",
        "step": "float16",
    }
    restored = saved(tmp_path / "x", tree, wanted)
    assert dtypes(restored["params"]) == {"w": "bfloat16", "norm": "float32"}
    assert dtypes(restored["mu"]) == {"w": "float16"}
    assert restored["step"].dtype == jnp.int32


def test_a_pattern_must_match_a_whole_key_path(tmp_path):
    tree = {"w": jnp.ones(2), "ww": jnp.ones(2), "a": jnp.ones(2)}
    restored = saved(tmp_path / "x", tree, {"w": "float16", "no": "bfloat16"})
    assert dtypes(restored) == {"w": "float16", "ww": "float32", "a": "float32"}


def test_a_whole_train_state(tmp_path):
    params = {"dense": {"kernel": jnp.ones((4, 8)) / 3, "bias": jnp.zeros(8)}}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))
    saved(tmp_path / "x", state, {r"opt_state/.*/(mu|nu)/.*": "bfloat16"})
    leaves = {name: str(leaf.spec) for name, leaf in flaxckpt.lazy(tmp_path / "x").items()}
    assert leaves["opt_state/0/mu/dense/kernel"] == "bfloat16[4,8]"
    assert leaves["params/dense/kernel"] == "float32[4,8]"
    assert leaves["opt_state/0/count"] == "int32[]"
    restored = flaxckpt.restore(tmp_path / "x", state, dtype="widen")
    assert_same(restored.params, state.params)
    kinds = [jax.tree.map(lambda x: x.dtype, s.opt_state) for s in (restored, state)]
    assert kinds[0] == kinds[1]


def test_a_module(tmp_path):
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(1)))
    before = jax.tree.map(jnp.array, nnx.state(model))
    saved(tmp_path / "x", model, {"layers/0/.*": "bfloat16"})
    assert_same(nnx.state(model), before)
    raw = flaxckpt.restore(tmp_path / "x", as_numpy=True)
    kinds = [raw["layers"][i][n].get_value().dtype.name for i, n in ((0, "kernel"), (1, "scale"))]
    assert kinds == ["bfloat16", "float32"]
    other = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(5)), nnx.BatchNorm(3, rngs=nnx.Rngs(6)))
    restored = flaxckpt.restore(tmp_path / "x", other, dtype="widen")
    kernel = nnx.state(restored)["layers"][0]["kernel"].get_value()
    expected = before["layers"][0]["kernel"].get_value().astype(jnp.bfloat16)
    assert kernel.dtype == jnp.float32
    assert (kernel == expected).all()


# Where it lies


def test_sharded_arrays_stay_where_they_are(tmp_path):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    specs = {"rows": P("x"), "both": P("x", "y"), "copies": P()}
    tree = {
        name: jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, spec))
        for name, spec in specs.items()
    }
    there = jax.device_put(jnp.arange(3.0), jax.devices()[5])
    saved(tmp_path / "x", tree | {"there": there}, "bfloat16")
    leaves = flaxckpt.lazy(tmp_path / "x")
    for name, spec in specs.items():
        assert leaves[name].sharding.spec == spec
        assert leaves[name].dtype == jnp.bfloat16
    restored = flaxckpt.restore(tmp_path / "x", tree | {"there": there}, dtype="widen")
    assert_same(restored, tree | {"there": there})  # small integers lose nothing
    for name, array in tree.items():
        assert restored[name].sharding == array.sharding
    assert restored["there"].devices() == {jax.devices()[5]}


# Back again


def test_a_restore_to_the_old_dtypes_asks_for_it(tmp_path):
    tree = {"a": jnp.linspace(0, 1, 5), "b": np.linspace(0, 1, 5)}
    saved(tmp_path / "x", tree, "bfloat16")
    with pytest.raises(errors.StructureMismatchError, match='dtype="widen"') as raised:
        flaxckpt.restore(tmp_path / "x", tree)
    assert [(row.problem, row.name) for row in raised.value.mismatches] == [
        ("dtype", "a"),
        ("dtype", "b"),
    ]
    restored = flaxckpt.restore(tmp_path / "x", tree, dtype="widen")
    assert dtypes(restored) == {"a": "float32", "b": "float64"}
    for name, array in tree.items():
        rounded = np.asarray(array).astype(jnp.bfloat16).astype(array.dtype)
        np.testing.assert_array_equal(np.asarray(restored[name]), rounded)


def test_a_run_is_resumed(tmp_path):
    def init():
        return {"w": jnp.full(4, 1 / 3), "step": jnp.zeros((), int)}

    with flaxckpt.CheckpointManager(tmp_path / "run", options=saving("bfloat16")) as ckpt:
        ckpt.save(3, ckpt.restore_or_init(init) | {"step": jnp.asarray(3)})
    with flaxckpt.CheckpointManager(tmp_path / "run", options=saving("bfloat16")) as ckpt:
        restored = ckpt.restore_or_init(init, dtype="widen")
    assert restored["w"].dtype == jnp.float32
    assert restored["step"] == 3


# What it costs


def test_a_checkpoint_is_half_as_large(tmp_path):
    tree = {"w": np.random.default_rng(0).random((300, 1000), np.float32)}
    sizes = []
    for dtype in (None, "bfloat16"):
        path = tmp_path / str(dtype)
        flaxckpt.save(path, tree, options=saving(dtype))
        sizes.append(sum(f.stat().st_size for f in path.rglob("*") if f.is_file()))
    assert sizes[0] > 1_200_000
    assert 0.49 < sizes[1] / sizes[0] < 0.51


@pytest.mark.parametrize("how", ["default", "in rounds", "not async"])
def test_a_plan_serves_all_saves(how, monkeypatch, tmp_path):
    made, real = [], save_plan.make_plan

    def noting(*args):
        made.append(args)
        return real(*args)

    monkeypatch.setattr(save_plan, "make_plan", noting)
    rounds = {"chunk_bytes": 4096, "max_host_bytes": 4 * 4096} if how == "in rounds" else {}
    options = saving({"w": "bfloat16", "n": "float16"}, **rounds)
    double = jax.jit(lambda state: jax.tree.map(lambda x: x * 2, state), donate_argnums=0)
    state = {"w": jnp.arange(9000.0) % 7, "n": np.ones(5000), "k": jax.random.key(0)}
    mirror = {"w": np.arange(9000.0) % 7, "n": np.ones(5000)}
    run = tmp_path / "run"
    with flaxckpt.CheckpointManager(run, options=options, async_=how != "not async") as ckpt:
        for step in range(4):
            ckpt.save(step, state)
            state |= {"w": double(state["w"])}  # which is donated
            state["n"] += 1
    assert len(made) == 1
    for step in range(4):
        restored = ckpt.restore(step=step, as_numpy=True)
        assert dtypes(restored) == {"w": "bfloat16", "n": "float16", "k": "key<fry>"}
        np.testing.assert_array_equal(restored["w"].astype(float), mirror["w"] * 2**step)
        np.testing.assert_array_equal(restored["n"].astype(float), mirror["n"] + step)


def test_items_are_saved_as_they_are(tmp_path):
    items = {"ema": {"w": np.ones(3, np.float32)}, "config": {"rate": 0.1}}
    saved(tmp_path / "x", {"w": jnp.ones(3)}, "bfloat16", items=items)
    found = flaxckpt.restore_items(tmp_path / "x", items)
    assert found["ema"]["w"].dtype == np.float32
    assert found["config"] == {"rate": 0.1}


def test_a_deleted_leaf_is_an_error_with_its_name(tmp_path):
    tree = {"a": jnp.ones(3), "params": [jnp.ones(2), jnp.ones(2)]}
    tree["params"][1].delete()
    with pytest.raises(errors.UnsupportedLeafError, match="the leaf params/1: its buffer was del"):
        flaxckpt.save(tmp_path / "x", tree, options=saving("bfloat16"))
    assert not (tmp_path / "x").exists()


# What is refused


@pytest.mark.parametrize("wanted", ["int8", "bool", "complex64", "<U3", "M8[s]"])
@pytest.mark.parametrize("by_pattern", [False, True])
def test_what_is_no_floating_dtype_is_refused(wanted, by_pattern):
    with pytest.raises(ValueError, match="dtype"):
        Options(save_dtype={"a": "float16", "b": wanted} if by_pattern else wanted)


@pytest.mark.parametrize("wanted", ["", "float33", "bf16", "float", "object", "O", "f4", "params"])
def test_what_is_no_name_is_refused(wanted):
    with pytest.raises(ValueError, match=f"dtype.*{wanted!r}"):
        Options(save_dtype=wanted)


@pytest.mark.parametrize(
    "wanted", [jnp.bfloat16, np.float16, np.dtype("float16"), 16, {"a": jnp.bfloat16}, {"a": None}]
)
def test_what_is_no_text_is_refused(wanted):
    """A dtype itself is what most people try first."""
    with pytest.raises((ValueError, TypeError), match=r"Options\.save_dtype"):
        Options(save_dtype=wanted)


@pytest.mark.parametrize("pattern", ["(", "[a", "*"])
def test_what_is_no_pattern_is_refused(pattern):
    """Not at the first save, hours later."""
    with pytest.raises(ValueError, match=r"Options\.save_dtype"):
        Options(save_dtype={pattern: "float16"})


def test_a_pattern_may_be_the_path_of_a_node(tmp_path):
    tree = {"params": {"a": np.ones(2, np.float32)}, "opt": np.ones(2, np.float32)}
    restored = saved(tmp_path / "x", tree, {"params": "bfloat16", ".*": "float16"})
    assert (restored["params"]["a"].dtype, restored["opt"].dtype) == ("bfloat16", "float16")


def test_a_glob_is_an_error(tmp_path):
    tree = {"params": {"a": np.ones(2, np.float32)}}
    with pytest.raises(errors.RuleError, match=r"not globs: use 'params/\.\*'"):
        flaxckpt.save(tmp_path / "x", tree, options=saving({"params/*": "bfloat16"}))
    assert not (tmp_path / "x").exists()
