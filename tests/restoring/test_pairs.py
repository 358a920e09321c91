"""Pairs of states that mean the same: each saved by three libraries, restored into the other."""

from __future__ import annotations

import collections
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from flax.core import freeze
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt import errors
from flaxckpt.formats.opening import open_source
from flaxckpt.restoring.restore import restore_tree
from flaxckpt.restoring.restore_plan import restore_arguments
from tests.formats.flax_states import SAMPLES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import orbax.checkpoint as ocp

ADAM, ADAMW = optax.adam(1e-3), optax.adamw(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)
SIZES = {"layer": (3, 4), "out": (4, 2)}


def save_with_orbax(path, tree):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, tree)


def save_with_flax(path, tree):
    path.write_bytes(serialization.to_bytes(tree))


WRITERS = {"flaxckpt": flaxckpt.save, "orbax": save_with_orbax, "msgpack": save_with_flax}
writers = pytest.mark.parametrize("writer", WRITERS)
# flax.serialization knows nothing of nnx.
nnx_writers = pytest.mark.parametrize("writer", ["flaxckpt", "orbax"])
there_and_back = pytest.mark.parametrize("there", [True, False], ids=["there", "back"])


def value_of(names, shape):
    """The value of a leaf, which only depends on its keys: no leaf has that of another."""
    seed = sum(ord(c) * (i + 1) for i, c in enumerate("/".join(names)))
    return (np.arange(np.prod(shape, dtype=int)) + seed * 100).reshape(shape).astype(np.float32)


def layers(*prefix):
    """Parameters, or their moments, as linen has them."""
    return {
        name: {
            "bias": jnp.asarray(value_of((*prefix, name, "bias"), shape[1:])),
            "kernel": jnp.asarray(value_of((*prefix, name, "kernel"), shape)),
        }
        for name, shape in SIZES.items()
    }


def zeros(tree):
    return jax.tree.map(jnp.zeros_like, tree)


def train_state(tx=ADAMW, like=lambda tree: tree, *, fresh=False):
    """A TrainState at step 7, with moments of Adam; `like` makes its trees of parameters.

    A fresh one has zeros everywhere: what it is given is seen.
    """
    params = layers("params")
    state = TrainState.create(apply_fn=None, params=like(params), tx=tx)
    if fresh:
        return state.replace(params=like(zeros(params)), step=0)
    moments = {"mu": like(layers("mu")), "nu": like(layers("nu"))}

    def filled(node):
        if isinstance(node, optax.ScaleByAdamState):
            return node._replace(count=jnp.asarray(7, jnp.int32), **moments)
        return node

    is_adam = lambda node: isinstance(node, optax.ScaleByAdamState)  # noqa: E731
    return state.replace(step=7, opt_state=jax.tree.map(filled, state.opt_state, is_leaf=is_adam))


def adam_of(state):
    """The one state of Adam in a tree."""
    is_adam = lambda node: isinstance(node, optax.ScaleByAdamState)  # noqa: E731
    (found,) = filter(is_adam, jax.tree.leaves(state, is_leaf=is_adam))
    return found


def assert_layers(tree, *prefix):
    """Every value is that of `layers`, by its own name."""
    for name, shape in SIZES.items():
        for leaf, size in (("kernel", shape), ("bias", shape[1:])):
            found = tree[name][leaf]
            found = found.value if isinstance(found, nn.Partitioned) else found
            found = found[...] if isinstance(found, nnx.Variable) else found
            assert isinstance(found, jax.Array)
            np.testing.assert_array_equal(found, value_of((*prefix, name, leaf), size))


def assert_state(state, like):
    """It has the containers of `like`, and the values of `train_state`."""
    assert jax.tree.structure(state) == jax.tree.structure(like)
    assert int(state.step) == 7
    assert_layers(state.params, "params")
    adam = adam_of(state.opt_state)
    assert int(adam.count) == 7
    assert_layers(adam.mu, "mu")
    assert_layers(adam.nu, "nu")


def reported(path, target, **how):
    """What was restored, and the report."""
    options = flaxckpt.Options()
    return restore_tree(open_source(path, options), target, restore_arguments(**how), options)


def written(writer, path, tree):
    WRITERS[writer](path, tree)
    return path


# Linen and linen: boxes, containers


def boxed(tree):
    return jax.tree.map(lambda x: nn.Partitioned(x, (None,) * x.ndim), tree)


def logically_boxed(tree):
    return jax.tree.map(lambda x: nn.LogicallyPartitioned(x, (None,) * x.ndim), tree)


def ordered(tree):
    items = tree.items() if isinstance(tree, dict) else None
    return tree if items is None else collections.OrderedDict((k, ordered(v)) for k, v in items)


def variables(tree):
    return jax.tree.map(nnx.Param, tree)


LIKE = {
    "boxed": boxed,
    "logically boxed": logically_boxed,
    "FrozenDict": freeze,
    "OrderedDict": ordered,
    "frozen and boxed": lambda tree: freeze(boxed(tree)),
}


@writers
@there_and_back
@pytest.mark.parametrize("name", LIKE)
def test_train_states_of_other_containers(name, there, writer, tmp_path):
    saved, target = (LIKE[name], dict) if there else (dict, LIKE[name])
    if (name, there, writer) == ("OrderedDict", True, "msgpack"):
        pytest.skip("flax.serialization holds no OrderedDict")
    path = written(writer, tmp_path / "c", train_state(like=saved))
    fresh = train_state(like=target, fresh=True)
    state, report = reported(path, fresh)
    assert_state(state, fresh)
    assert (report.initialised, report.ignored) == ((), ())


@writers
@there_and_back
def test_a_model_with_partitioned_parameters(there, writer, tmp_path):
    """As a user's modules have them, and their moments with them."""
    init = nn.initializers.normal()
    model = nn.Dense(4, kernel_init=nn.with_partitioning(init, (None, "model")))
    with_boxes = model.init(jax.random.key(0), jnp.ones((1, 3)))["params"]
    without = nn.meta.unbox(with_boxes)

    def state(params, number):
        made = TrainState.create(apply_fn=None, params=params, tx=ADAMW)
        return jax.tree.map(lambda x: x + number, made)

    saved, target = (with_boxes, without) if there else (without, with_boxes)
    path = written(writer, tmp_path / "c", state(saved, 3))
    fresh = state(target, 0)
    found = flaxckpt.restore(path, fresh)
    assert jax.tree.structure(found) == jax.tree.structure(fresh)
    moments = nn.meta.unbox(found.opt_state[0].mu)
    np.testing.assert_array_equal(moments["kernel"], np.full((3, 4), 3.0))
    kernel = nn.meta.unbox(found.params)["kernel"]
    np.testing.assert_array_equal(kernel, np.asarray(without["kernel"]) + 3)


@pytest.mark.parametrize("writer", ["flaxckpt", "orbax"])
@there_and_back
def test_variables_of_nnx_and_plain_arrays(there, writer, tmp_path):
    saved, target = layers("params"), zeros(layers("params"))
    saved, target = (variables(saved), target) if there else (saved, variables(target))
    found = flaxckpt.restore(written(writer, tmp_path / "c", saved), target)
    assert jax.tree.structure(found) == jax.tree.structure(target)
    assert_layers(found, "params")


@writers
@there_and_back
def test_numbers_and_their_names_as_keys(there, writer, tmp_path):
    """As a library without int keys has made them of a dict with these."""
    numbers = {i: {"kernel": jnp.full((2,), i + 1.0)} for i in range(12)}
    names = {str(i): layer for i, layer in numbers.items()}
    saved, target = (numbers, names) if there else (names, numbers)
    path = written(writer, tmp_path / "c", {"blocks": saved})
    found = flaxckpt.restore(path, {"blocks": zeros(target)})["blocks"]
    assert found.keys() == target.keys()
    assert [float(layer["kernel"][1]) for layer in found.values()] == [
        float(key) + 1 for key in found
    ]


@writers
@pytest.mark.parametrize("container", [list, tuple], ids=["list", "tuple"])
def test_sequences_and_dicts_of_numbers(container, writer, tmp_path):
    sequence = container(jnp.full(2, float(i)) for i in range(12))
    numbers = {i: jnp.zeros(2) for i in range(12)}
    path = written(writer, tmp_path / "c", {"blocks": sequence})
    found = flaxckpt.restore(path, {"blocks": numbers})["blocks"]
    assert {key: float(x[0]) for key, x in found.items()} == {i: float(i) for i in range(12)}
    path = written(writer, tmp_path / "d", {"blocks": dict(enumerate(sequence))})
    found = flaxckpt.restore(path, {"blocks": container(numbers.values())})["blocks"]
    assert type(found) is container
    assert [float(x[0]) for x in found] == [float(i) for i in range(12)]


# The optimizer has moved, and nothing but the fields tells its states

MOVED = {
    "clip and adamw": (CLIPPED, "1/0"),
    "clip and adam": (optax.chain(optax.clip(1.0), ADAM), "1/0"),
    "flat": (optax.chain(optax.clip(1.0), optax.scale_by_adam(), optax.scale(-1.0)), "1"),
    "masked": (optax.masked(ADAM, lambda params: jax.tree.map(lambda _: True, params)),
               "inner_state/0"),
}  # fmt: skip


@writers
@there_and_back
@pytest.mark.parametrize("name", MOVED)
def test_adam_moves_within_its_chain(name, there, writer, tmp_path):
    tx, where = MOVED[name]
    saved, target = (ADAM, tx) if there else (tx, ADAM)
    path = written(writer, tmp_path / "c", train_state(saved))
    fresh = train_state(target, fresh=True)
    state, report = reported(path, fresh)
    assert_state(state, fresh)
    assert (report.initialised, report.ignored) == ((), ())
    # Announced, in whatever spelling the format has for an index.
    leaves = [f"{m}/{n}/{p}" for m in ("mu", "nu") for n in SIZES for p in ("bias", "kernel")]
    before, after = ("0", where) if there else (where, "0")
    wanted = {
        f"opt_state/{before}/{leaf}": f"opt_state/{after}/{leaf}" for leaf in ["count", *leaves]
    }
    renamed = {saved.replace("%3", ""): name for saved, name in report.renamed}
    assert wanted.items() <= renamed.items()


@writers
@there_and_back
def test_boxed_moments_move(there, writer, tmp_path):
    """Orbax and flax keep the value of a box below one more key."""
    saved, target = (boxed, dict) if there else (dict, boxed)
    path = written(writer, tmp_path / "c", train_state(ADAM, saved))
    fresh = train_state(CLIPPED, target, fresh=True)
    state, report = reported(path, fresh)
    assert_state(state, fresh)
    assert "opt_state/1/0/mu/layer/kernel" in [name for _, name in report.renamed]


@writers
def test_a_warm_start_announces_what_moved(writer, tmp_path):
    path = written(writer, tmp_path / "c", train_state(ADAM))
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        state = ckpt.restore_or_init(lambda: train_state(CLIPPED, fresh=True), init_from=path)
        assert_layers(state.opt_state[1][0].mu, "mu")
        assert "renamed" in str(ckpt.report)
        assert ("opt_state/1/0/count") in [name for _, name in ckpt.report.renamed]


@writers
def test_another_optimizer_is_refused_whoever_saved(writer, tmp_path):
    path = written(writer, tmp_path / "c", train_state(ADAM))
    target = train_state(optax.sgd(0.1, momentum=0.9), fresh=True)
    with pytest.raises(errors.StructureMismatchError, match="opt_state/0/trace/layer/kernel"):
        flaxckpt.restore(path, target)
    state = flaxckpt.restore(path, target, opt_state="reset")
    assert_layers(state.params, "params")
    assert float(state.opt_state[0].trace["layer"]["kernel"].sum()) == 0


# Linen and nnx


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        for name, shape in SIZES.items():
            setattr(self, name, nnx.Linear(*shape, rngs=rngs))


class Blocks(nnx.Module):
    def __init__(self, count=11):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([nnx.Linear(1, 2, rngs=rngs) for _ in range(count)])


def model_and_optimizer(tx=ADAMW, *, fresh=False):
    model = Model()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    state = nnx.state(optimizer)
    if not fresh:
        put(nnx.state(model), layers("params"))
        adam = state["opt_state"][0]
        put(adam["mu"], layers("mu"))
        put(adam["nu"], layers("nu"))
        adam["count"][...] = jnp.asarray(7, jnp.int32)
        state["step"][...] = jnp.asarray(7, jnp.uint32)
    return model, optimizer


def put(state, tree):
    for name, layer in tree.items():
        for leaf, value in layer.items():
            state[name][leaf][...] = value


def assert_model(model):
    assert isinstance(model, Model)
    assert_layers(nnx.state(model), "params")
    found = model.layer(jnp.ones((1, 3)))
    wanted = value_of(("params", "layer", "kernel"), (3, 4)).sum(0)
    bias = value_of(("params", "layer", "bias"), (4,))
    np.testing.assert_array_equal(found[0], wanted + bias)


def assert_optimizer(optimizer, *, where=lambda chain: chain[0]):
    state = nnx.state(optimizer)
    assert int(state["step"][...]) == 7
    adam = where(state["opt_state"])
    assert int(adam["count"][...]) == 7
    assert_layers(adam["mu"], "mu")
    assert_layers(adam["nu"], "nu")


# What each library can hold of a model of nnx: `nnx.state` of it, or its pure dict.
def savable(writer, *objects):
    found = {
        "flaxckpt": lambda x: x,
        "orbax": nnx.state,
        "msgpack": lambda x: nnx.to_pure_dict(nnx.state(x)),
    }
    trees = tuple(found[writer](x) for x in objects)
    return trees[0] if len(trees) == 1 else trees


TO_PAIR = [
    flaxckpt.Rename("params/(.*)", r"0/\1"),
    flaxckpt.Rename("(step|opt_state/.*)", r"1/\1"),
    flaxckpt.Cast("1/step", "uint32"),
]
TO_STATE = [
    flaxckpt.Rename(r"(?:%3)?0/(.*)", r"params/\1"),
    flaxckpt.Rename(r"(?:%3)?1/(.*)", r"\1"),
]


@writers
def test_variables_of_linen_in_a_module(writer, tmp_path):
    path = written(writer, tmp_path / "c", {"params": layers("params")})
    assert_model(flaxckpt.restore(path, Model(), only="params"))
    rule = flaxckpt.Rename("params/(.*)", r"\1")
    assert_model(flaxckpt.restore(path, Model(), transforms=[rule]))


@writers
def test_parameters_of_linen_in_a_module_without_a_word(writer, tmp_path):
    assert_model(flaxckpt.restore(written(writer, tmp_path / "c", layers("params")), Model()))


@writers
def test_a_module_in_variables_of_linen(writer, tmp_path):
    model, _ = model_and_optimizer()
    path = written(writer, tmp_path / "c", savable(writer, model))
    target = zeros(layers("params"))
    assert_layers(flaxckpt.restore(path, target), "params")
    rule = flaxckpt.Rename("(.*)", r"params/\1")
    found = flaxckpt.restore(path, {"params": target}, transforms=[rule])
    assert_layers(found["params"], "params")
    frozen = flaxckpt.restore(path, freeze(target))
    assert jax.tree.structure(frozen) == jax.tree.structure(freeze(target))
    assert_layers(flaxckpt.restore(path, boxed(target)), "params")


@writers
def test_a_train_state_in_a_module_and_its_optimizer(writer, tmp_path):
    path = written(writer, tmp_path / "c", train_state())
    model, optimizer = flaxckpt.restore(path, model_and_optimizer(fresh=True), transforms=TO_PAIR)
    assert_model(model)
    assert_optimizer(optimizer)


@writers
def test_a_train_state_in_an_optimizer_alone(writer, tmp_path):
    path = written(writer, tmp_path / "c", train_state())
    optimizer = flaxckpt.restore(
        path,
        model_and_optimizer(fresh=True)[1],
        transforms=[flaxckpt.Cast("step", "uint32")],
        unexpected={"params/.*": "ignore"},
    )
    assert_optimizer(optimizer)


@writers
def test_a_module_and_its_optimizer_in_a_train_state(writer, tmp_path):
    path = written(writer, tmp_path / "c", savable(writer, *model_and_optimizer()))
    fresh = train_state(fresh=True)
    assert_state(flaxckpt.restore(path, fresh, transforms=TO_STATE), fresh)


@writers
def test_the_optimizer_of_nnx_has_moved(writer, tmp_path):
    path = written(writer, tmp_path / "c", savable(writer, *model_and_optimizer()))
    (model, optimizer), report = reported(path, model_and_optimizer(CLIPPED, fresh=True))
    assert_model(model)
    assert_optimizer(optimizer, where=lambda chain: chain[1][0])
    moved = [name for _, name in report.renamed]
    assert "1/opt_state/1/0/mu/layer/kernel" in moved


FORMS = {
    "module": lambda model: model,
    "state": nnx.state,
    "pure dict": lambda model: nnx.to_pure_dict(nnx.state(model)),
}


@pytest.mark.parametrize("target", FORMS)
@pytest.mark.parametrize(
    ("writer", "saved"),
    [
        *(("flaxckpt", form) for form in FORMS),
        *(("orbax", form) for form in FORMS),
        ("msgpack", "pure dict"),
    ],
)
def test_the_forms_of_a_module(writer, saved, target, tmp_path):
    path = written(writer, tmp_path / "c", FORMS[saved](model_and_optimizer()[0]))
    wanted = FORMS[target](Model())
    found = flaxckpt.restore(path, wanted)
    assert type(found) is type(wanted)
    if target == "module":
        assert_model(found)
    else:
        assert_layers(found, "params")


def unrolled():
    return {
        f"blocks_{i}": {"bias": jnp.full(2, float(i)), "kernel": jnp.full((1, 2), i + 0.5)}
        for i in range(11)
    }


def numbered():
    model = Blocks()
    for i, block in enumerate(model.blocks):
        block.bias[...], block.kernel[...] = jnp.full(2, float(i)), jnp.full((1, 2), i + 0.5)
    return model


@writers
def test_unrolled_layers_of_linen_in_a_list_of_nnx(writer, tmp_path):
    path = written(writer, tmp_path / "c", {"params": unrolled()})
    rule = flaxckpt.Rename(r"blocks_(\d+)/(.*)", r"blocks/\1/\2")
    model = flaxckpt.restore(path, Blocks(), only="params", transforms=[rule])
    assert [float(block.bias[1]) for block in model.blocks] == list(range(11))
    assert [float(block.kernel[0, 1]) for block in model.blocks] == [i + 0.5 for i in range(11)]


@writers
def test_a_list_of_nnx_in_unrolled_layers_of_linen(writer, tmp_path):
    path = written(writer, tmp_path / "c", savable(writer, numbered()))
    # A format without int keys has names of digits, which are %3 and the digit in a key path.
    rule = flaxckpt.Rename(r"blocks/(?:%3)?(\d+)/(.*)", r"blocks_\1/\2")
    found = flaxckpt.restore(path, zeros(unrolled()), transforms=[rule])
    for i in range(11):
        assert float(found[f"blocks_{i}"]["kernel"][0, 1]) == i + 0.5
        assert float(found[f"blocks_{i}"]["bias"][0]) == i


@pytest.mark.parametrize("target", FORMS)
@pytest.mark.parametrize(
    ("writer", "saved"),
    [
        *(("flaxckpt", form) for form in FORMS),
        *(("orbax", form) for form in FORMS),
        ("msgpack", "pure dict"),
    ],
)
def test_the_forms_of_a_list(writer, saved, target, tmp_path):
    """Among them a module that Orbax took for a pytree."""
    path = written(writer, tmp_path / "c", FORMS[saved](numbered()))
    found = flaxckpt.restore(path, FORMS[target](Blocks()))
    pure = found if target == "pure dict" else nnx.to_pure_dict(
        nnx.state(found) if target == "module" else found
    )  # fmt: skip
    assert [float(pure["blocks"][i]["bias"][1]) for i in range(11)] == list(range(11))


def test_update_takes_variables_of_linen(tmp_path):
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        ckpt.save(5, {"params": layers("params"), "batch_stats": {"mean": jnp.ones(2)}})
        for how in (
            {"only": "params"},
            {
                "transforms": [
                    flaxckpt.Rename("params/(.*)", r"\1"),
                    flaxckpt.Drop("batch_stats/.*"),
                ]
            },
        ):
            model = Model()
            kept = model.layer.kernel
            assert ckpt.update(model, **how) == 5
            assert_model(model)
            assert model.layer.kernel is kept
        untouched = Model()
        before = np.asarray(untouched.layer.kernel[...])
        with pytest.raises(errors.StructureMismatchError):
            ckpt.update(untouched)
        np.testing.assert_array_equal(untouched.layer.kernel[...], before)


def test_update_takes_a_train_state(tmp_path):
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        ckpt.save(5, train_state())
        model, optimizer = model_and_optimizer(fresh=True)
        assert ckpt.update(model, optimizer, transforms=TO_PAIR) == 5
    assert_model(model)
    assert_optimizer(optimizer)


def test_update_of_a_part(tmp_path):
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        ckpt.save(5, model_and_optimizer())
        model = Model()
        assert ckpt.update(model, only="0") == 5
        assert_model(model)
        ckpt.save(6, model_and_optimizer()[0])
        model = Model()
        kept = np.asarray(model.out.kernel[...])
        assert ckpt.update(model, only="layer/.*") == 6
        np.testing.assert_array_equal(model.out.kernel[...], kept)
        kernel = value_of(("params", "layer", "kernel"), SIZES["layer"])
        np.testing.assert_array_equal(model.layer.kernel[...], kernel)


# What other libraries wrote, sharded over a mesh of 4 x 2 devices. All values as `xxd` shows them.

KERNEL_0 = "0b6574bf3089de3ec6e34bbf705ffcbea5a1073f27773d3f"
KERNEL_1 = (
    "02fe2d3ae6f1223ede1bb73dbfb3d7be424ca43e5d2cdf3e"
    "1d1b0fbfc0fdb8be8564be3ecea2743e4e00613e9970a83e"
)
# T5X cast its parameters from bfloat16.
ROUNDED_0 = "000074bf0000df3e00004cbf0000fcbe0000083f00003d3f"
ROUNDED_1 = (
    "00002e3a0000233e0000b73d0000d8be0000a43e0000df3e"
    "00000fbf0000b9be0000be3e0000753e0000613e0000a83e"
)
BIAS, ROUNDED_BIAS, MU, NU = "361283ba", "000083ba", "cdcccc3d", "6f12833a"
ORBAX_KERNEL = "3c87993fe359b33d56614f3ec94c29bf3aab033f77b3923f"

SHAPES = {"Dense_0": {"bias": (2,), "kernel": (3, 2)}, "Dense_1": {"bias": (3,), "kernel": (4, 3)}}
SPECS = {
    "params/Dense_0/bias": P("model"),
    "params/Dense_0/kernel": P(None, "model"),
    "params/Dense_1/kernel": P("data"),
}
WANTED_SPECS = {
    "Dense_0": {"bias": P("model"), "kernel": P(None, "model")},
    "Dense_1": {"bias": P(), "kernel": P("data")},
}


def fresh_dense():
    params = jax.tree.map(jnp.zeros, SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    return TrainState.create(apply_fn=None, params=params, tx=ADAMW)


def fresh_orbax():
    params = {"bias": jnp.ones(3), "kernel": jnp.zeros((2, 3))}
    return TrainState.create(apply_fn=None, params=params, tx=ADAM)


@pytest.fixture
def mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def assert_dumps(tree, dumps, mesh):
    """The bytes of each leaf of a tree of layers, and where it lies."""
    for name, layer in SHAPES.items():
        for leaf, shape in layer.items():
            found = tree[name][leaf]
            assert (found.shape, found.dtype) == (shape, jnp.float32)
            assert np.asarray(found).tobytes().hex() == dumps[name][leaf]
            wanted = NamedSharding(mesh, WANTED_SPECS[name][leaf])
            assert found.sharding.is_equivalent_to(wanted, len(shape))
            assert len(found.addressable_shards) == 8
            for shard in found.addressable_shards:
                np.testing.assert_array_equal(shard.data, np.asarray(found)[shard.index])


def params_dump(bias=BIAS, first=KERNEL_0, second=KERNEL_1):
    return {
        "Dense_0": {"bias": bias * 2, "kernel": first},
        "Dense_1": {"bias": bias * 3, "kernel": second},
    }


def same_dump(value):
    return {
        "Dense_0": {"bias": value * 2, "kernel": value * 6},
        "Dense_1": {"bias": value * 3, "kernel": value * 12},
    }


OPT = flaxckpt.Rename("opt/(.*)", r"opt_state/\1")
IGNORED = {"unexpected": {"chrono/.*": "ignore"}}
# The sample, the step it is at, and what has to be said; `None`: it has no step.
STATES = {
    "flax_legacy/checkpoint_1": (1, {}),
    "flax_legacy/checkpoint_10": (10, {}),
    "clu": (2, {}),
    "clu/ckpt-1.flax": (1, {}),
    "t5x/checkpoint_1": (1, {"unexpected": {"flax_mutables/.*": "ignore"}}),
    "big_vision/checkpoint.bv-000000010": (None, {"transforms": [OPT], **IGNORED}),
    "big_vision/checkpoint.bv": (None, {"transforms": [OPT], **IGNORED}),
    "levanter/step-7": (None, {"transforms": [OPT], **IGNORED}),
}


@pytest.mark.parametrize("name", STATES)
def test_train_states_of_other_libraries_on_a_mesh(name, mesh, tmp_path):
    step, how = STATES[name]
    if step is not None:
        target = flaxckpt.abstract_state(fresh_dense, mesh=mesh, specs=SPECS)
        state = flaxckpt.restore(SAMPLES / name, target, **how)
    else:  # what it has no value for must come from somewhere
        ckpt = flaxckpt.CheckpointManager(tmp_path / "run")
        state = ckpt.restore_or_init(
            fresh_dense, mesh=mesh, specs=SPECS, init_from=SAMPLES / name,
            missing={"step": "init"}, **how,
        )  # fmt: skip
        assert ckpt.report.initialised == ("step",)
        assert ckpt.report.ignored == ("chrono/accum_train_time",)
        ckpt.close()
    rounded = (ROUNDED_BIAS, ROUNDED_0, ROUNDED_1) if name.startswith("t5x") else ()
    assert isinstance(state, TrainState)
    assert int(state.step) == (step or 0)
    assert_dumps(state.params, params_dump(*rounded), mesh)
    adam = state.opt_state[0]
    assert isinstance(adam, optax.ScaleByAdamState)
    assert (int(adam.count), adam.count.dtype) == (1, jnp.int32)
    assert_dumps(adam.mu, same_dump(MU), mesh)
    assert_dumps(adam.nu, same_dump(NU), mesh)


PARAMS = {
    "big_vision/params.npz": {"unexpected": {"params/bf16": "ignore"}},
    "safetensors/model.safetensors": {"transforms": [flaxckpt.Rename("(.*)", r"params/\1")]},
    "safetensors": {"transforms": [flaxckpt.Rename(r"(.*)\.(.*)", r"params/\1/\2")]},
}


@pytest.mark.parametrize("name", PARAMS)
def test_parameters_of_other_libraries_on_a_mesh(name, mesh, tmp_path):
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        state = ckpt.restore_or_init(
            fresh_dense, mesh=mesh, specs=SPECS, init_from=SAMPLES / name,
            missing={"step|opt_state/.*": "init"}, **PARAMS[name],
        )  # fmt: skip
        assert_dumps(state.params, params_dump(), mesh)
        assert_dumps(state.opt_state[0].mu, same_dump("00000000"), mesh)
        assert len(ckpt.report.restored) == 4
    target = flaxckpt.abstract_state(fresh_dense, mesh=mesh, specs=SPECS).params
    if not name.startswith("big_vision"):  # the names of which agree but for spelling
        assert_dumps(flaxckpt.restore(SAMPLES / name, target), params_dump(), mesh)


# It wrote the step, a number, as an array of int64.
VERSIONS = {"0.2.7": [flaxckpt.Cast("step", "int32")], "0.4.4": [], "0.6.4": []}


@pytest.mark.parametrize("version", VERSIONS)
def test_train_states_of_every_orbax_on_a_mesh(version, mesh):
    target = flaxckpt.abstract_state(fresh_orbax, mesh=mesh, specs={"params/kernel": P("model")})
    path = SAMPLES / "orbax" / version / "ts"
    state = flaxckpt.restore(path, target, transforms=VERSIONS[version])
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(target.opt_state)
    assert int(state.step) == int(state.opt_state[0].count) == 0
    rows = NamedSharding(mesh, P("model"))
    for kernel, dump in (
        (state.params["kernel"], ORBAX_KERNEL),
        (state.opt_state[0].mu["kernel"], "00000000" * 6),
        (state.opt_state[0].nu["kernel"], "00000000" * 6),
    ):
        assert kernel.sharding.is_equivalent_to(rows, 2)
        assert np.asarray(kernel).tobytes().hex() == dump
    assert np.asarray(state.params["bias"]).tobytes().hex() == "00000000" * 3
    assert state.params["bias"].sharding.is_fully_replicated


@pytest.mark.parametrize("version", VERSIONS)
def test_moments_of_every_orbax_move(version, mesh):
    def init():
        return TrainState.create(apply_fn=None, params=fresh_orbax().params, tx=CLIPPED)

    target = flaxckpt.abstract_state(init, mesh=mesh, specs={"params/kernel": P("model")})
    path = SAMPLES / "orbax" / version / "ts"
    state, report = reported(path, target, transforms=VERSIONS[version])
    assert jax.tree.structure(state) == jax.tree.structure(target)
    assert ("opt_state/0/mu/kernel", "opt_state/1/0/mu/kernel") in report.renamed
    assert (
        state.opt_state[1][0]
        .mu["kernel"]
        .sharding.is_equivalent_to(NamedSharding(mesh, P("model")), 2)
    )
