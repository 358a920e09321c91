"""Forty-five real training states, by name: `BUILD[name]()` builds one."""

import collections

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from clu import metrics as clu_metrics
from flax import nnx, struct
from flax.core import freeze
from flax.linen import fp8_ops
from flax.training import dynamic_scale, train_state

BUILD = {}


def P0():
    return {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros((8,))}}


def state(f):
    BUILD[f.__name__] = f
    return f


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(8)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(2)(x)


@state
def linen_adamw():
    m = nn.Dense(8)
    p = m.init(jax.random.key(0), jnp.ones((1, 4)))["params"]
    return train_state.TrainState.create(apply_fn=m.apply, params=p, tx=optax.adamw(1e-3))


@state
def linen_adamw_after_step():
    s = linen_adamw()
    return s.apply_gradients(grads=jax.tree.map(jnp.ones_like, s.params))


@state
def chain_clip_sgd_schedule():
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.sgd(optax.cosine_decay_schedule(0.1, 100), momentum=0.9),
    )
    return tx.init(P0())


@state
def adafactor():
    big = {"k": jnp.ones((256, 128)), "b": jnp.ones((8,))}
    return optax.adafactor(1e-3).init(big)


@state
def adafactor_momentum_none():
    return optax.adafactor(
        1e-3, momentum=None, multiply_by_parameter_scale=False, clipping_threshold=None
    ).init({"k": jnp.ones((256, 128))})


@state
def masked():
    return optax.masked(optax.adam(1e-3), {"dense": {"kernel": True, "bias": False}}).init(P0())


@state
def multi_transform():
    return optax.multi_transform(
        {"train": optax.adam(1e-3), "freeze": optax.set_to_zero()},
        {"dense": {"kernel": "train", "bias": "freeze"}},
    ).init(P0())


@state
def multi_steps():
    return optax.MultiSteps(optax.adam(1e-3), every_k_schedule=4).init(P0())


@state
def inject_hyperparams():
    return optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3).init(P0())


@state
def inject_hyperparams_schedule():
    return optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.linear_schedule(0.0, 1e-3, 10)
    ).init(P0())


@state
def lookahead():
    tx = optax.lookahead(optax.sgd(1e-2), sync_period=5, slow_step_size=0.5)
    lp = optax.LookaheadParams.init_synced(P0())
    return {"params": lp, "opt_state": tx.init(lp)}


@state
def schedule_free():
    return optax.contrib.schedule_free_adamw(1e-3).init(P0())


@state
def ema_params():
    return {
        "opt": optax.chain(optax.adam(1e-3), optax.ema(0.99)).init(P0()),
        "ema": optax.ema(0.999).init(P0()),
    }


@state
def apply_if_finite():
    return optax.apply_if_finite(optax.adam(1e-3), 5).init(P0())


@state
def lbfgs():
    return optax.lbfgs(memory_size=2).init({"w": jnp.ones((3,))})


@state
def add_noise_rng():
    return optax.add_noise(0.1, 0.5, 0).init(P0())


@state
def dp_aggregate():
    return optax.contrib.differentially_private_aggregate(1.0, 1.0, 0).init(P0())


@state
def muon():
    return optax.contrib.muon(1e-3).init({"k": jnp.ones((4, 8)), "b": jnp.ones((8,))})


@state
def named_chain():
    return optax.named_chain(("clip", optax.clip(1.0)), ("adam", optax.adam(1e-3))).init(P0())


@state
def batch_stats_state():
    class TS(train_state.TrainState):
        batch_stats: object = None

    m = MLP()
    v = m.init(jax.random.key(0), jnp.ones((1, 4)))
    return TS.create(
        apply_fn=m.apply, params=v["params"], tx=optax.sgd(0.1), batch_stats=v["batch_stats"]
    )


@state
def frozen_dict():
    return freeze({"params": P0(), "cache": {}, "n": {"10": jnp.ones(1), "2": jnp.zeros(1)}})


@state
def prng_keys():
    return {
        "typed": jax.random.key(0),
        "rbg": jax.random.key(1, impl="rbg"),
        "raw": jax.random.PRNGKey(0),
        "batch": jax.random.split(jax.random.key(2), 3),
    }


@state
def fp8_meta():
    m = nn.Dense(8, dot_general_cls=fp8_ops.Fp8DotGeneralOp)
    v = m.init(jax.random.key(0), jnp.ones((4, 4)))
    return train_state.TrainState.create(apply_fn=m.apply, params=v, tx=optax.adam(1e-3))


@state
def low_precision_leaves():
    return {
        "bf16": jnp.ones(2, jnp.bfloat16),
        "e4m3": jnp.ones(2, jnp.float8_e4m3fn),
        "e5m2": jnp.ones(2, jnp.float8_e5m2),
        "int4": jnp.ones(4, jnp.int4),
        "uint4": jnp.ones(4, jnp.uint4),
        "int2": jnp.ones(4, jnp.int2),
        "bool": jnp.ones(2, bool),
        "c64": jnp.ones(2, jnp.complex64),
        "e2m1": jnp.ones(2, jnp.float4_e2m1fn),
    }


@state
def partitioned_boxes():
    m = nn.Dense(
        8,
        kernel_init=nn.with_partitioning(nn.initializers.ones, ("data", "model")),
        bias_init=nn.with_partitioning(nn.initializers.zeros, ("model",)),
    )
    p = m.init(jax.random.key(0), jnp.ones((1, 4)))["params"]
    return train_state.TrainState.create(apply_fn=m.apply, params=p, tx=optax.adam(1e-3))


@state
def partitioned_adafactor():
    m = nn.Dense(256, kernel_init=nn.with_partitioning(nn.initializers.ones, ("data", "model")))
    p = m.init(jax.random.key(0), jnp.ones((1, 128)))["params"]
    return optax.adafactor(1e-3).init(p)


@state
def logically_partitioned():
    m = nn.Dense(
        8, kernel_init=nn.with_logical_partitioning(nn.initializers.ones, ("embed", "mlp"))
    )
    return m.init(jax.random.key(0), jnp.ones((1, 4)))["params"]


class NNXModel(nnx.Module):
    def __init__(self, rngs):
        self.l1 = nnx.Linear(4, 8, rngs=rngs)
        self.bn = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])


@state
def nnx_state():
    return nnx.state(NNXModel(nnx.Rngs(0, dropout=1)))


@state
def nnx_pure_dict():
    return nnx.to_pure_dict(nnx.state(NNXModel(nnx.Rngs(0, dropout=1))))


@state
def nnx_optimizer():
    m = NNXModel(nnx.Rngs(0, dropout=1))
    return nnx.state(nnx.Optimizer(m, optax.adamw(1e-3), wrt=nnx.Param))


@state
def nnx_split_graphdef():
    g, s = nnx.split(NNXModel(nnx.Rngs(0)))
    return {"graphdef": g, "state": s}


@state
def nnx_module_direct():
    return nnx.Linear(2, 3, rngs=nnx.Rngs(0))


@state
def nnx_rngs():
    return nnx.state(nnx.Rngs(params=0, dropout=1))


@state
def nnx_metrics():
    return nnx.state(
        nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
    )


@state
def dyn_scale():
    return dynamic_scale.DynamicScale()


@state
def scan_stacked():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(4)(x), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x, _ = nn.scan(
                Block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )(name="layers")(x, None)
            return x

    return Net().init(jax.random.key(0), jnp.ones((1, 4)))


@state
def clu_collection():
    @struct.dataclass
    class M(clu_metrics.Collection):
        loss: clu_metrics.Average.from_output("loss")
        acc: clu_metrics.Accuracy
        last: clu_metrics.LastValue.from_output("loss")

    return M.single_from_model_output(
        loss=jnp.array(1.0), logits=jnp.ones((2, 3)), labels=jnp.array([0, 1])
    )


@state
def python_leaves():
    return {
        "i": 3,
        "big": 2**70,
        "f": 0.1,
        "s": "hi",
        "b": True,
        "none": None,
        "c": 1 + 2j,
        "np": np.float32(2.0),
        "npi": np.int64(5),
        "bytes": b"x",
        "empty_l": [],
        "empty_t": (),
        "empty_d": {},
        "npa": np.arange(3),
        "strs": np.array(["a", "b"]),
    }


@state
def int_and_odd_keys():
    return {
        "0": jnp.ones(1),
        "a/b": {"c": jnp.ones(1)},
        "a": {"b/c": jnp.zeros(1)},
        "a.b": jnp.ones(1),
        "": jnp.ones(1),
        "..": jnp.zeros(1),
        "é": jnp.ones(1),
        "CON": jnp.ones(1),
        "w": {},
        "x": {"y": ()},
    }


@state
def int_keys():
    return {0: jnp.ones(1), 10: jnp.ones(1), 2: jnp.zeros(1)}


@state
def ordered_defaultdict():
    d = collections.defaultdict(list)
    d["b"] = [jnp.ones(1)]
    d["a"] = []
    return collections.OrderedDict([("z", d), ("a", jnp.zeros(1))])


@state
def struct_static_and_nested():
    @struct.dataclass
    class Inner:
        w: jax.Array
        name: str = struct.field(pytree_node=False, default="x")

    @struct.dataclass
    class S:
        step: int
        inner: Inner
        opt: tuple
        extra: object = None

    return S(step=0, inner=Inner(jnp.ones(2)), opt=(Inner(jnp.zeros(2)), (), None))


@state
def zero_size_and_scalars():
    return {
        "zs": jnp.zeros((0, 3)),
        "scalar": jnp.float32(1.0),
        "weak": jnp.asarray(1.0),
        "np0": np.array(3),
    }


@state
def shared_arrays():
    x = jnp.ones(3)
    return {"a": x, "b": x}


@state
def train_state_list_of_ts():
    # ppo / gan style: many TrainStates + target params
    s = linen_adamw()
    return {
        "gen": s,
        "disc": s,
        "target": s.params,
        "history": collections.namedtuple("H", ["loss", "n"])(jnp.ones(2), 3),
    }
