"""Abstract states: every leaf where the model says, and always somewhere valid."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt.errors import RuleError, ShardingError
from flaxckpt.sharding.abstract import InitialState
from tests import zoo
from tests.trees import assert_same

RULES = [("embed", "data"), ("mlp", "model")]
OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=4),
    "adafactor_unfactored": optax.adafactor(1e-3, factored=False),
    "sm3": optax.sm3(1e-3),
    "lbfgs": optax.lbfgs(memory_size=2),
    "novograd": optax.novograd(1e-3),
    "muon": optax.contrib.muon(1e-3),
    "masked": optax.masked(optax.adam(1e-3), {"a": {"kernel": True, "bias": False}}),
    "multi_transform": optax.multi_transform(
        {"x": optax.adam(1e-3), "y": optax.set_to_zero()}, {"a": {"kernel": "x", "bias": "y"}}
    ),
    "multi_steps": optax.MultiSteps(optax.adam(1e-3), 4),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-3),
    "chain": optax.chain(optax.clip(1.0), optax.adam(1e-3), optax.ema(0.9)),
}


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=str)
def mesh(request):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(request.param,) * 2)


def specs_of(tree):
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        jax.tree_util.keystr(p, simple=True, separator="/"): leaf.sharding.spec
        for p, leaf in leaves
    }


def jittable(tree):
    """`tree` with zeros for what jit cannot return: text and large ints."""

    def keep(leaf):
        if isinstance(leaf, np.ndarray | np.generic):
            return leaf if leaf.dtype.kind in "iufcb" else 0
        return 0 if isinstance(leaf, str | bytes | int) else leaf

    return jax.tree.map(keep, tree)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(zoo.BUILD))
def test_every_state_of_the_zoo_is_made_saved_and_restored_on_a_mesh(name, mesh, tmp_path):
    def init():
        return jittable(zoo.BUILD[name]())

    abstract = flaxckpt.abstract_state(init, mesh=mesh, rules=RULES)
    made = InitialState(init, (), mesh, RULES, None).tree()
    flaxckpt.save(tmp_path / "x", made)
    restored = flaxckpt.restore(tmp_path / "x", abstract)
    assert_same(made, restored)
    for tree in (made, restored):
        for leaf, wanted in zip(jax.tree.leaves(tree), jax.tree.leaves(abstract), strict=True):
            assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("how", ["boxed", "by path"])
def test_optimizer_state_is_valid_and_mirrors_its_params(name, how, mesh):
    """Where a leaf has the shape of its parameter it has its spec, or at least a valid one."""

    def init():
        kernel, bias = jnp.ones((8, 16)), jnp.zeros((16,))
        if how == "boxed":
            kernel = nn.Partitioned(kernel, ("data", "model"))
            bias = nn.Partitioned(bias, ("model",))
        params = {"a": {"kernel": kernel, "bias": bias}}
        return {"params": params, "opt_state": OPTIMIZERS[name].init(params)}

    by_path = {"params/a/kernel": P("data", "model"), ".*/bias": P("model")}
    specs = by_path if how == "by path" else None
    abstract = flaxckpt.abstract_state(init, mesh=mesh, specs=specs)
    for leaf in jax.tree.leaves(abstract):
        leaf.sharding.shard_shape(leaf.shape)
    found = jax.tree.leaves(abstract["opt_state"])
    like_kernel = [leaf.sharding.spec for leaf in found if leaf.shape == (8, 16)]
    assert all(spec == P("data", "model") for spec in like_kernel)
    assert like_kernel or name in ("adafactor", "lbfgs", "sm3")


def test_adafactor_by_a_pattern_that_matches_its_factors_too(mesh):
    def init():
        params = {"kernel": jnp.ones((256, 128))}
        return {"params": params, "opt_state": optax.adafactor(1e-3).init(params)}

    specs = {".*/kernel": P("data", "model")}
    abstract = flaxckpt.abstract_state(init, mesh=mesh, specs=specs)
    assert specs_of(abstract)["opt_state/0/v_row/kernel"] == P()
    assert abstract["params"]["kernel"].sharding.spec == P("data", "model")


def test_logical_rules_from_the_context(mesh):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_logical_partitioning(nn.initializers.ones, ("embed", "mlp"))
            return nn.Dense(8, kernel_init=init)(x)

    def init(rng):
        params = Model().init(rng, jnp.ones((1, 4)))["params"]
        return TrainState.create(apply_fn=Model().apply, params=params, tx=optax.adam(1e-3))

    with nn.logical_axis_rules(RULES):
        by_context = flaxckpt.abstract_state(init, jax.random.key(0), mesh=mesh)
    by_argument = flaxckpt.abstract_state(init, jax.random.key(0), mesh=mesh, rules=RULES)
    for abstract in (by_context, by_argument):
        found = specs_of(abstract)
        assert found["params/Dense_0/kernel/value"] == P("data", "model")
        assert found["opt_state/0/mu/Dense_0/kernel/value"] == P("data", "model")
        assert found["params/Dense_0/bias"] == P()


def test_nnx_module_and_optimizer(mesh, tmp_path):
    class Model(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
            self.first = nnx.Linear(8, 16, rngs=rngs, kernel_init=init)
            self.again = self.first
            self.drop = nnx.Dropout(0.5, rngs=rngs)

    def init(rng):
        model = Model(nnx.Rngs(params=rng, dropout=1))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    arguments = {"mesh": mesh, "rules": RULES}
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        model, optimizer = ckpt.restore_or_init(init, jax.random.key(0), **arguments)
        ckpt.save(0, (model, optimizer))
        other, _ = ckpt.restore_or_init(init, jax.random.key(7), **arguments)
    moment = optimizer.opt_state[0].mu["again"]["kernel"].get_value()
    for kernel in (model.first.kernel.get_value(), moment, other.first.kernel.get_value()):
        assert kernel.sharding.spec == P("data", "model")
    assert (other.first.kernel.get_value() == model.first.kernel.get_value()).all()
    assert other.first is other.again


def test_arguments_that_are_no_arrays_are_passed_as_they_are(mesh, tmp_path):
    def init(rng, size, shapes, config):
        assert type(size) is int
        assert config == {"dtype": "bfloat16", "depth": 2}
        return {"w": jax.random.normal(rng, (size, *shapes[0].shape), config["dtype"])}

    arguments = (jax.random.key(0), 3, [np.zeros(4)], {"dtype": "bfloat16", "depth": 2})
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        state = ckpt.restore_or_init(init, *arguments, mesh=mesh)
    assert (state["w"].shape, state["w"].dtype) == ((3, 4), jnp.bfloat16)


def test_a_key_that_is_committed_to_one_device_is_no_obstacle(mesh, tmp_path):
    key = jax.device_put(jax.random.key(0), jax.devices()[3])
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        state = ckpt.restore_or_init(
            lambda rng: {"w": jax.random.normal(rng, (8,))}, key, mesh=mesh
        )
    assert state["w"].sharding.device_set == set(jax.devices())


def test_abstract_arguments_are_traced_too():
    abstract = flaxckpt.abstract_state(
        lambda x: {"w": x * 2}, jax.ShapeDtypeStruct((3,), jnp.float32)
    )
    assert abstract["w"].shape == (3,)


def test_without_a_mesh_leaves_go_to_the_default_device(tmp_path):
    abstract = flaxckpt.abstract_state(lambda: {"w": jnp.ones(3)})
    assert abstract["w"].sharding is None
    flaxckpt.save(tmp_path / "x", {"w": jnp.ones(3)})
    restored = flaxckpt.restore(tmp_path / "x", abstract)
    assert restored["w"].devices() == {jax.devices()[0]}
    assert not restored["w"].committed


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (P("data"), "axis 0 of size 6 is not divisible by 4 (data)"),
        (P(None, None, "model"), "the spec has 3 entries, the array 2 axes"),
        (P("tensor"), "the mesh has no axis 'tensor', only data, model"),
        (P("model", "model"), "the mesh axis 'model' is used twice"),
    ],
)
def test_a_param_whose_spec_does_not_fit_is_an_error_that_names_it(spec, why, mesh):
    def init():
        return {"params": {"kernel": jnp.ones((6, 8))}}

    with pytest.raises(ShardingError) as raised:
        flaxckpt.abstract_state(init, mesh=mesh, specs={"params/.*": spec})
    assert str(raised.value).startswith(f"params/kernel cannot be sharded: {why}.\n")
    assert "mesh:  {'data': 4, 'model': 2}" in str(raised.value)


def test_a_pattern_of_specs_may_be_the_path_of_a_node():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))

    def init():
        layer = {"kernel": jnp.ones((4, 2)), "bias": jnp.ones(2)}
        return {"params": {"a.b": layer, "axb": layer}}

    specs = {"params/a.b": P("x"), "params/.*/kernel": P(None, "x")}
    found = flaxckpt.abstract_state(init, mesh=mesh, specs=specs)["params"]
    assert found["a.b"]["kernel"].sharding.spec == found["a.b"]["bias"].sharding.spec == P("x")
    assert found["axb"]["kernel"].sharding.spec == P(None, "x")
    assert found["axb"]["bias"].sharding.spec == P()
    with pytest.raises(RuleError, match=r"^specs: .* not globs: use 'params/\.\*/kernel'"):
        flaxckpt.abstract_state(init, mesh=mesh, specs={"params/*/kernel": P("x")})
