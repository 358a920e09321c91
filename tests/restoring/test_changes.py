"""What changes between a checkpoint and a target, one change at a time, with its whole message."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.core import freeze
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import flaxckpt
from flaxckpt import errors
from flaxckpt.formats.opening import open_source
from flaxckpt.leaves.kinds import describe
from flaxckpt.restoring.restore import restore_tree
from flaxckpt.restoring.restore_plan import restore_arguments
from tests.trees import assert_same

ADAM = optax.adam(1e-3)
GONE = object()
MOMENTS = [f"{m}/{p}" for m in ("mu", "nu") for p in ("bias", "kernel")]


def params():
    return {"bias": jnp.arange(8.0), "kernel": jnp.arange(32.0).reshape(4, 8)}


def state(tx=ADAM, p=None):
    p = params() if p is None else p
    opt_state = jax.tree.map(lambda x: x + 7, tx.init(p))
    return {"opt_state": opt_state, "params": p}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("changes") / "c"
    flaxckpt.save(path, state())
    return path


def restored(path, target, **how):
    """The tree and the report."""
    return restore_tree(
        open_source(path, flaxckpt.Options()), target, restore_arguments(**how), flaxckpt.Options()
    )


def message(path, target, **how):
    """The message of the refusal."""
    with pytest.raises(errors.StructureMismatchError) as raised:
        flaxckpt.restore(path, target, **how)
    return str(raised.value)


def with_params(**changes):
    target = state()
    changed = target["params"] | changes
    return target | {"params": {k: v for k, v in changed.items() if v is not GONE}}


def refusal(path, count, *lines):
    return "\n".join([f"the checkpoint at {path} does not fit the target ({count} leaves)", *lines])


# One mutation at a time


def test_one_array_renamed(path):
    target = with_params(kernel=GONE, weight=jnp.zeros((4, 8)))
    text = message(path, target)
    assert text == refusal(
        path,
        "2 of 8",
        "  missing     params/weight  checkpoint: -             target: float32[4,8]"
        "  (did you mean params/kernel?)",
        "  unexpected  params/kernel  checkpoint: float32[4,8]  target: -",
        'If that is meant, pass transforms=[flaxckpt.Rename("params/kernel", "params/weight")]; '
        'gaps are allowed with missing="init" and unexpected="ignore".',
    )
    rule = flaxckpt.Rename("params/kernel", "params/weight")
    tree, report = restored(path, target, transforms=[rule])
    np.testing.assert_array_equal(tree["params"]["weight"], params()["kernel"])
    assert report.renamed == (("params/kernel", "params/weight"),)


def test_one_subtree_renamed(tmp_path):
    flaxckpt.save(tmp_path / "c", {"old_head": {"kernel": jnp.ones(2), "bias": jnp.zeros(1)}})
    target = {"new_head": {"kernel": jnp.zeros(2), "bias": jnp.ones(1)}}
    assert message(tmp_path / "c", target) == refusal(
        tmp_path / "c",
        "4 of 4",
        "  missing     new_head/bias    checkpoint: -           target: float32[1]"
        "  (did you mean old_head/bias?)",
        "  missing     new_head/kernel  checkpoint: -           target: float32[2]"
        "  (did you mean old_head/kernel?)",
        "  unexpected  old_head/bias    checkpoint: float32[1]  target: -",
        "  unexpected  old_head/kernel  checkpoint: float32[2]  target: -",
        'If that is meant, pass transforms=[flaxckpt.Rename("old_head/(.*)", r"new_head/\\1")]; '
        'gaps are allowed with missing="init" and unexpected="ignore".',
    )
    rule = flaxckpt.Rename("old_head/(.*)", r"new_head/\1")  # as the message says
    tree = flaxckpt.restore(tmp_path / "c", target, transforms=[rule])
    assert [float(x.sum()) for x in jax.tree.leaves(tree)] == [0.0, 2.0]


def test_the_rename_that_is_proposed_is_one_between_arrays_of_one_type(tmp_path):
    flaxckpt.save(tmp_path / "c", {"body": {"kernel": jnp.ones((1, 32))}})
    target = {"between": {"kernel": jnp.ones((32, 32))}, "embody": {"kernel": jnp.ones((1, 32))}}
    assert 'flaxckpt.Rename("body/(.*)", r"embody/\\1")' in message(tmp_path / "c", target)


def test_one_array_reshaped(path):
    assert message(path, with_params(kernel=jnp.zeros((8, 4)))) == refusal(
        path,
        "1 of 7",
        "  shape  params/kernel  checkpoint: float32[4,8]  target: float32[8,4]",
        "Build the target with the sizes that the checkpoint was saved with, or change the arrays "
        "with flaxckpt.Resize(pattern, pad=0) or flaxckpt.Apply(pattern, fn).",
    )
    rule = flaxckpt.Apply("params/kernel", lambda path, kernel: kernel.T)
    tree = flaxckpt.restore(path, with_params(kernel=jnp.zeros((8, 4))), transforms=[rule])
    np.testing.assert_array_equal(tree["params"]["kernel"], params()["kernel"].T)


def test_one_array_recast(path):
    target = with_params(kernel=jnp.zeros((4, 8), jnp.bfloat16))
    assert message(path, target) == refusal(
        path,
        "1 of 7",
        "  dtype  params/kernel  checkpoint: float32[4,8]  target: bfloat16[4,8]",
        'Give the target the saved dtypes, or pass dtype="saved" to get them, or dtype="cast" to '
        'convert them (dtype="widen" for floats to wider floats only). 64-bit types need '
        "jax_enable_x64.",
    )
    tree, report = restored(path, target, dtype="cast")
    assert tree["params"]["kernel"].dtype == jnp.bfloat16
    assert report.cast == (("params/kernel", "float32[4,8]", "bfloat16[4,8]"),)
    tree = flaxckpt.restore(path, target, transforms=[flaxckpt.Cast("params/kernel", "bfloat16")])
    assert tree["params"]["kernel"].dtype == jnp.bfloat16


def test_a_float_is_widened_only_when_that_was_said(tmp_path):
    flaxckpt.save(tmp_path / "c", {"w": jnp.ones(2, jnp.bfloat16), "n": jnp.ones(2, jnp.int8)})
    target = {"w": jnp.zeros(2), "n": jnp.zeros(2, jnp.int8)}
    assert [m[1] for m in restored(tmp_path / "c", target, dtype="widen")[1].cast] == [
        "bfloat16[2]"
    ]
    with pytest.raises(errors.StructureMismatchError, match="dtype  w"):
        flaxckpt.restore(tmp_path / "c", target)
    target["n"] = jnp.zeros(2, jnp.int32)
    with pytest.raises(errors.StructureMismatchError, match="dtype  n"):
        flaxckpt.restore(tmp_path / "c", target, dtype="widen")


MESH = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
ROWS = NamedSharding(MESH, PartitionSpec("x"))
# The saved leaf, the target's, and the one that dtype="saved" gives.
DTYPES = {
    "floats": (jnp.ones(2, jnp.bfloat16), jnp.zeros(2), jnp.ones(2, jnp.bfloat16)),
    "ints": (np.ones(2, np.int8), np.zeros(2, np.float64), np.ones(2, np.int8)),
    "numpy for jax": (np.ones(2, np.float16), jnp.zeros(2), jnp.ones(2, jnp.float16)),
    "jax for numpy": (jnp.ones(2), np.zeros(2), np.ones(2, np.float32)),
    "numpy scalar": (np.float16(1), np.float32(0), np.float16(1)),
    "number for an array": (3, jnp.float32(0), jnp.int32(3)),
    "number for a numpy array": (3, np.zeros(()), np.array(3)),
    "array for a number": (jnp.float32(1.5), 0, 1.5),
    "the same": (jnp.ones(2), jnp.zeros(2), jnp.ones(2)),
    "a number that fits": (3, jnp.int8(0), jnp.int8(3)),
}


@pytest.mark.parametrize("name", DTYPES)
def test_the_saved_dtype_is_given_where_the_targets_differs(name, tmp_path):
    saved, target, expected = DTYPES[name]
    flaxckpt.save(tmp_path / "c", {"a": saved, "b": [1.0]})
    tree, report = restored(tmp_path / "c", {"a": target, "b": [0.0]}, dtype="saved")
    assert_same(tree, {"a": expected, "b": [1.0]})
    if name in ("the same", "a number that fits"):
        assert report.saved_dtype == ()
        assert "saved dtype" not in str(report)
    else:
        ((leaf, wanted, got),) = report.saved_dtype
        assert (leaf, wanted, got) == ("a", described(target), described(expected))
        assert "1 in the saved dtype" in str(report)
        with pytest.raises(errors.StructureMismatchError, match="dtype  a"):
            flaxckpt.restore(tmp_path / "c", {"a": target, "b": [0.0]})


def described(leaf):
    return str(describe(leaf, "a")[0])


def test_the_saved_dtype_on_the_sharding_of_the_target(tmp_path):
    flaxckpt.save(tmp_path / "c", {"w": jnp.arange(8, dtype=jnp.bfloat16)})
    target = {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=ROWS)}
    tree, report = restored(tmp_path / "c", target, dtype="saved")
    assert (tree["w"].dtype, tree["w"].sharding) == (jnp.bfloat16, ROWS)
    np.testing.assert_array_equal(tree["w"], np.arange(8))
    assert report.saved_dtype == (("w", "float32[8]", "bfloat16[8]"),)
    assert report.cast == ()


def test_the_saved_dtype_changes_no_shape_kind_or_key(tmp_path):
    for saved, target in (
        (jnp.ones(2), jnp.ones(3, jnp.bfloat16)),
        (1, "text"),
        (1, 1.5),
        (jax.random.key(0), jax.random.key(0, impl="rbg")),
    ):
        flaxckpt.save(tmp_path / "c", saved, overwrite=True)
        with pytest.raises(errors.StructureMismatchError):
            flaxckpt.restore(tmp_path / "c", target, dtype="saved")


def test_the_saved_dtype_in_a_run_that_drifted(tmp_path):
    """A train step gave float32 where the first state had bfloat16."""

    def init():
        return {"w": jnp.zeros(8, jnp.bfloat16), "new": jnp.ones(1)}

    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        ckpt.save(1, {"w": jnp.full(8, 0.1)})
        how = {"mesh": MESH, "specs": {"w": PartitionSpec("x")}, "missing": {"new": "init"}}
        with pytest.raises(errors.StructureMismatchError):
            ckpt.restore_or_init(init, **how)
        tree = ckpt.restore_or_init(init, dtype="saved", **how)
        assert (tree["w"].dtype, tree["w"].sharding) == (jnp.float32, ROWS)
        np.testing.assert_array_equal(tree["w"], np.full(8, 0.1, np.float32))
        assert ckpt.report.saved_dtype == (("w", "bfloat16[8]", "float32[8]"),)
        assert ckpt.report.initialised == ("new",)


class Described:
    """A leaf that says what an array is like."""

    def __init__(self, array, sharding=None):
        self.shape, self.dtype, self.sharding = array.shape, array.dtype, sharding


def test_a_target_of_leaves_that_only_describe_arrays(path):
    target = jax.tree.map(Described, state())
    target["params"]["bias"].sharding = ROWS
    target["params"]["kernel"].dtype = "float32"
    tree = flaxckpt.restore(path, target)
    assert tree["params"]["bias"].sharding == ROWS
    assert_same(jax.device_get(tree), jax.device_get(state()))
    target["params"]["bias"].shape = (7,)
    assert "shape  params/bias" in message(path, target)
    target["params"]["more"] = Described(jnp.ones(3))
    with pytest.raises(errors.RuleError, match="no value for params/more, and the target is abs"):
        flaxckpt.restore(path, target, only="params/more|step|params/kernel", missing="init")


def test_one_array_missing(path):
    target = with_params(scale=jnp.full(3, 5.0))
    assert message(path, target) == refusal(
        path,
        "1 of 8",
        "  missing  params/scale  checkpoint: -  target: float32[3]",
        'Build the target the way the saved state was built, or allow gaps with missing="init" '
        'and unexpected="ignore".',
    )
    for policy in ("init", {"params/sca.*": "init"}, {"params": "init"}, {"params/scale": "init"}):
        tree, report = restored(path, target, missing=policy)
        np.testing.assert_array_equal(tree["params"]["scale"], np.full(3, 5.0))
        np.testing.assert_array_equal(tree["params"]["kernel"], params()["kernel"])
        assert report.initialised == ("params/scale",)
    assert "missing  params/scale" in message(path, target, missing={"params/kernel": "init"})


def test_a_missing_array_needs_a_value_from_somewhere(path):
    target = jax.eval_shape(lambda: with_params(scale=jnp.zeros(3)))
    with pytest.raises(errors.RuleError) as raised:
        flaxckpt.restore(path, target, missing="init")
    assert str(raised.value) == (
        "the checkpoint has no value for params/scale, and the target is abstract there. Give a "
        "concrete target, or use CheckpointManager.restore_or_init."
    )


def test_one_array_too_many(path):
    target = with_params(bias=GONE)
    assert message(path, target) == refusal(
        path,
        "1 of 7",
        "  unexpected  params/bias  checkpoint: float32[8]  target: -",
        'Build the target the way the saved state was built, or allow gaps with missing="init" '
        'and unexpected="ignore".',
    )
    for policy in ("ignore", {".*/bias": "ignore"}, {"params": "ignore"}):
        tree, report = restored(path, target, unexpected=policy)
        assert list(tree["params"]) == ["kernel"]
        assert report.ignored == ("params/bias",)
    rule = flaxckpt.Drop("params/bias")
    assert list(flaxckpt.restore(path, target, transforms=[rule])["params"]) == ["kernel"]


@pytest.mark.parametrize("empty", [None, {}, ()], ids=["None", "dict", "tuple"])
def test_an_empty_node_for_an_array_whatever_gaps_are_allowed(path, empty, tmp_path):
    shown = f"{type(empty).__name__.replace('NoneType', 'None')} (empty)"
    target = state()
    target["params"]["bias"] = empty
    gaps = {"missing": "init", "unexpected": "ignore"}
    assert message(path, target, **gaps) == refusal(
        path,
        "1 of 7",
        f"  empty  params/bias  checkpoint: float32[8]  target: {shown}",
        "Build the target the way the saved state was built, or leave the array out with "
        'transforms=[flaxckpt.Drop("params/bias")].',
    )
    rule = flaxckpt.Drop("params/bias")
    assert flaxckpt.restore(path, target, transforms=[rule])["params"]["bias"] == empty

    flaxckpt.save(tmp_path / "c", target)
    assert message(tmp_path / "c", state(), **gaps) == refusal(
        tmp_path / "c",
        "1 of 7",
        f"  empty  params/bias  checkpoint: {shown}  target: float32[8]",
        "Build the target the way the saved state was built, or take its own value with "
        'transforms=[flaxckpt.Fallback("params/bias", "target")].',
    )
    rule = flaxckpt.Fallback("params/bias", "target")
    tree, report = restored(tmp_path / "c", state(), transforms=[rule])
    np.testing.assert_array_equal(tree["params"]["bias"], params()["bias"])
    assert report.initialised == ("params/bias",)


MASKED = optax.masked(ADAM, {"bias": False, "kernel": True})


def test_masked_in_the_target(path):
    assert message(path, state(MASKED)) == refusal(
        path,
        "2 of 7",
        "  empty  opt_state/0/mu/bias  checkpoint: float32[8]  target: MaskedNode (empty)"
        "  (masked in the target)",
        "  empty  opt_state/0/nu/bias  checkpoint: float32[8]  target: MaskedNode (empty)"
        "  (masked in the target)",
        "Build the target the way the saved state was built, or leave the array out with "
        'transforms=[flaxckpt.Drop("opt_state/0/mu/bias")].',
    )
    rule = flaxckpt.Drop(r"opt_state/0/../bias")
    tree, report = restored(path, state(MASKED), transforms=[rule])
    assert jax.tree.structure(tree) == jax.tree.structure(state(MASKED))
    assert ("opt_state/0/mu/kernel", "opt_state/inner_state/0/mu/kernel") in report.renamed


def test_masked_in_the_checkpoint(tmp_path):
    flaxckpt.save(tmp_path / "c", state(MASKED))
    unmasked = state(optax.masked(ADAM, {"bias": True, "kernel": True}))
    assert message(tmp_path / "c", unmasked) == refusal(
        tmp_path / "c",
        "2 of 7",
        "  empty  opt_state/inner_state/0/mu/bias  checkpoint: MaskedNode (empty)"
        "  target: float32[8]  (masked in the checkpoint)",
        "  empty  opt_state/inner_state/0/nu/bias  checkpoint: MaskedNode (empty)"
        "  target: float32[8]  (masked in the checkpoint)",
        "Build the target the way the saved state was built, or take its own value with "
        'transforms=[flaxckpt.Fallback("opt_state/inner_state/0/mu/bias", "target")].',
    )


# The optimizer

MOVED = {
    "adamw": (optax.adamw(1e-3), None),
    "clip and adam": (optax.chain(optax.clip(1.0), ADAM), "1/0"),
    "clip and adamw": (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), "1/0"),
    "flat": (optax.chain(optax.clip(1.0), optax.scale_by_adam(), optax.scale(0.1)), "1"),
    "bare": (optax.scale_by_adam(), ""),
}


@pytest.mark.parametrize("name", MOVED)
@pytest.mark.parametrize("there", [True, False], ids=["there", "back"])
def test_moved_in_the_chain(name, there, tmp_path):
    tx, position = MOVED[name]
    saved, target = (ADAM, tx) if there else (tx, ADAM)
    flaxckpt.save(tmp_path / "c", state(saved))
    fresh = {"opt_state": target.init(params()), "params": params()}
    tree, report = restored(tmp_path / "c", fresh)
    assert jax.tree.structure(tree) == jax.tree.structure(fresh)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(state(saved)), strict=True):
        np.testing.assert_array_equal(a, b)
    here = "opt_state/0" if position is None else "/".join(filter(None, ["opt_state", position]))
    renamed = [(f"opt_state/0/{leaf}", f"{here}/{leaf}") for leaf in ["count", *MOMENTS]]
    wanted = [] if position is None else [pair if there else pair[::-1] for pair in renamed]
    assert sorted(report.renamed) == sorted(wanted)


def test_a_state_of_another_class_is_never_taken_for_its_name(tmp_path):
    schedule = optax.scale_by_schedule(optax.constant_schedule(0.1))
    saved = optax.chain(optax.scale_by_adam(), schedule)
    target = optax.chain(optax.clip(1.0), optax.scale_by_adam(), schedule)
    of_adam, of_schedule = saved.init(params())
    flaxckpt.save(tmp_path / "c", (of_adam, of_schedule._replace(count=jnp.asarray(50))))
    tree, report = restored(tmp_path / "c", target.init(params()))
    assert int(tree[2].count) == 50
    assert int(tree[1].count) == 0
    assert ("1/count", "2/count") in report.renamed
    assert ("0/count", "1/count") in report.renamed


def test_two_states_of_one_class_that_moved_are_ambiguous(tmp_path):
    two = optax.chain(optax.trace(0.9), optax.trace(0.8))
    three = optax.chain(optax.clip(1.0), optax.trace(0.9), optax.trace(0.8))
    saved = {"bias": jnp.zeros(8)}
    flaxckpt.save(tmp_path / "c", {"opt_state": two.init(saved)})
    assert message(tmp_path / "c", {"opt_state": three.init(saved)}) == refusal(
        tmp_path / "c",
        "1 of 3",
        "  ambiguous  opt_state/2/trace/bias  checkpoint: -  target: float32[8]"
        "  (may be opt_state/0/trace/bias)",
        "Say which it is with transforms=[flaxckpt.Rename(...)], or begin the optimizer anew with "
        'opt_state="reset".',
    )
    rules = [flaxckpt.Rename(rf"opt_state/{i}/(.*)", rf"opt_state/{i + 1}/\1") for i in (1, 0)]
    tree = flaxckpt.restore(tmp_path / "c", {"opt_state": three.init(saved)}, transforms=rules)
    assert jax.tree.structure(tree) == jax.tree.structure({"opt_state": three.init(saved)})


def test_another_optimizer(path):
    sgd = optax.sgd(0.1, momentum=0.9)
    assert message(path, state(sgd)) == refusal(
        path,
        "7 of 9",
        "  missing     opt_state/0/trace/bias    checkpoint: -             target: float32[8]",
        "  missing     opt_state/0/trace/kernel  checkpoint: -             target: float32[4,8]",
        "  unexpected  opt_state/0/count         checkpoint: int32[]       target: -",
        "  unexpected  opt_state/0/mu/bias       checkpoint: float32[8]    target: -",
        "  unexpected  opt_state/0/mu/kernel     checkpoint: float32[4,8]  target: -",
        "  unexpected  opt_state/0/nu/bias       checkpoint: float32[8]    target: -",
        "  unexpected  opt_state/0/nu/kernel     checkpoint: float32[4,8]  target: -",
        "Build the optimizer the way the saved one was built, begin it anew with "
        'opt_state="reset", or allow gaps with missing="init" and unexpected="ignore".',
    )
    target = state(sgd)
    tree, report = restored(path, target, opt_state="reset")
    assert tree["opt_state"][0].trace["bias"] is target["opt_state"][0].trace["bias"]
    np.testing.assert_array_equal(tree["params"]["kernel"], params()["kernel"])
    assert report.restored == ("params/bias", "params/kernel")
    assert report.initialised == ("opt_state/0/trace/bias", "opt_state/0/trace/kernel")
    assert report.ignored == tuple(f"opt_state/0/{leaf}" for leaf in ["count", *MOMENTS])


# Spellings


def boxed(tree):
    return jax.tree.map(lambda x: nn.Partitioned(x, (None,) * x.ndim), tree)


PAIRS = {
    "boxed": (lambda: state(p=boxed(params())), lambda: state()),
    "frozen": (lambda: state(p=freeze(params())), lambda: state()),
    "int keys": (lambda: {"l": {0: jnp.ones(2)}}, lambda: {"l": {"0": jnp.zeros(2)}}),
    "list": (lambda: {"l": [jnp.ones(2)]}, lambda: {"l": {"0": jnp.zeros(2)}}),
    "value": (lambda: {"w": {"value": jnp.ones(2)}}, lambda: {"w": jnp.zeros(2)}),
    "dots": (lambda: {"a": {"b": jnp.ones(2)}}, lambda: {"a.b": jnp.zeros(2)}),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("there", [True, False], ids=["there", "back"])
def test_spellings(name, there, tmp_path):
    make_saved, make_target = PAIRS[name] if there else PAIRS[name][::-1]
    saved, target = make_saved(), make_target()
    flaxckpt.save(tmp_path / "c", saved)
    tree = flaxckpt.restore(tmp_path / "c", target)
    assert jax.tree.structure(tree) == jax.tree.structure(target)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(saved), strict=True):
        np.testing.assert_array_equal(a, b)


def test_two_keys_that_look_alike_are_not_mixed_up(tmp_path):
    flaxckpt.save(tmp_path / "c", {"l": {"a.b": jnp.ones(1)}, "m": jnp.zeros(1)})
    target = {"l": {"a": {"b": jnp.zeros(1)}, "a.b": jnp.zeros(1)}, "m": jnp.zeros(1)}
    assert "missing  l/a/b" in message(tmp_path / "c", target)
