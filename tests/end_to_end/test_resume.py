"""Resuming: the same bits as without a stop, and no more compilations than a fresh start."""

import functools

import flax.linen as nn
import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import flaxckpt
from flaxckpt.errors import ResumeMismatchError
from flaxckpt.testing import assert_bitwise_resume, differences

pytestmark = pytest.mark.slow


class Model(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.Dense(16)(x))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(1)(x)


class State(TrainState):
    key: jax.Array


def init_linen(rng):
    model = Model()
    params = model.init(rng, jnp.ones((1, 4)), train=False)["params"]
    tx = optax.adamw(optax.cosine_decay_schedule(1e-2, 100))
    return State.create(apply_fn=model.apply, params=params, tx=tx, key=jax.random.key(1))


def step_linen(state, batch):
    key, dropout = jax.random.split(state.key)

    def loss(params):
        out = state.apply_fn({"params": params}, batch, train=True, rngs={"dropout": dropout})
        return jnp.mean(out**2)

    return state.apply_gradients(grads=jax.grad(loss)(state.params), key=key)


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        return self.second(self.drop(nnx.relu(self.first(x))))


def init_nnx():
    model = NnxModel(nnx.Rngs(0, dropout=1))
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


def step_nnx(model, optimizer, batch):
    grads = nnx.grad(lambda m: jnp.mean(m(batch) ** 2))(model)
    optimizer.update(model, grads)


class Data:
    """Batches whose position is part of what must be saved."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def batch(self):
        return self.rng.normal(size=(8, 4)).astype(np.float32)


@pytest.fixture
def compilations():
    """The names of the events of jax's compiler, as they happen."""
    events = []

    def note(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield events
    jax.monitoring.unregister_event_duration_listener(note)


def linen_loop(directory, *, restore_data=True):
    data = Data()
    step_fn = jax.jit(step_linen, donate_argnums=0)

    def loop(steps):
        with flaxckpt.CheckpointManager(directory) as ckpt:
            abstract = flaxckpt.abstract_state(init_linen, jax.random.key(0))
            if ckpt.latest_step() is None:
                state = ckpt.restore_or_init(init_linen, jax.random.key(0))
            else:
                restored = ckpt.restore({"state": abstract, "data": data.rng})
                state = restored["state"]
                data.rng = restored["data"] if restore_data else data.rng
            for step in range(ckpt.next_step, steps):
                state = step_fn(state, data.batch())
                ckpt(step, {"state": state, "data": data.rng})
        return {"state": state, "data": data.rng}

    return loop


def test_linen_with_dropout_and_the_position_in_the_data():
    assert_bitwise_resume(linen_loop, steps=6, stop_at=3)


def test_a_forgotten_position_is_noticed():
    forgetful = functools.partial(linen_loop, restore_data=False)
    with pytest.raises(ResumeMismatchError, match=r"state/params/Dense_0/kernel: \d+ of 256 bytes"):
        assert_bitwise_resume(forgetful, steps=6, stop_at=3)


def test_nnx_with_dropout():
    def make_loop(directory):
        model, optimizer = init_nnx()
        step_fn = nnx.jit(step_nnx)

        def loop(steps):
            with flaxckpt.CheckpointManager(directory) as ckpt:
                ckpt.update(model, optimizer)
                for step in range(ckpt.next_step, steps):
                    batch = np.random.default_rng(step).normal(size=(8, 4)).astype(np.float32)
                    step_fn(model, optimizer, batch)
                    ckpt(step, (model, optimizer))
            return model, optimizer

        return loop

    assert_bitwise_resume(make_loop, steps=6, stop_at=3)


@pytest.mark.parametrize("stop_at", [0, 3, 4])
def test_stop_at_must_lie_within_the_run(stop_at):
    with pytest.raises(ValueError, match="stop_at"):
        assert_bitwise_resume(linen_loop, steps=3, stop_at=stop_at)


def compiled(events, step_fn, state, steps=3):
    """How many programs `steps` steps compile."""
    events.clear()
    batch = np.ones((8, 4), np.float32)
    for _ in range(steps):
        state = step_fn(state, batch)
    jax.block_until_ready(jax.tree.leaves(state))
    return len(events)


@pytest.mark.parametrize("on_mesh", [False, True])
def test_a_resumed_linen_step_compiles_no_more_than_a_fresh_one(on_mesh, tmp_path, compilations):
    mesh = jax.make_mesh((8,), ("data",)) if on_mesh else None
    ckpt = flaxckpt.CheckpointManager(tmp_path / "run")

    def start():
        state = ckpt.restore_or_init(init_linen, jax.random.key(0), mesh=mesh)
        # A new treedef (its tx is new) makes jit compile: what counts is the number per start.
        return jax.jit(step_linen), state

    step_fn, state = start()
    fresh = compiled(compilations, step_fn, state)
    assert fresh > 0
    ckpt.save(0, step_fn(state, np.ones((8, 4), np.float32)), wait=True)
    step_fn, state = start()
    assert compiled(compilations, step_fn, state) == fresh
    ckpt.close()


def test_a_restore_in_a_running_process_compiles_nothing(tmp_path, compilations):
    state = init_linen(jax.random.key(0))
    step_fn = jax.jit(step_linen)
    batch = np.ones((8, 4), np.float32)
    state = step_fn(step_fn(state, batch), batch)
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        ckpt.save(0, state)
        restored = ckpt.restore(state)
    assert compiled(compilations, step_fn, restored) == 0


def test_a_resumed_nnx_step_compiles_no_more_than_a_fresh_one(tmp_path, compilations):
    def step(state, batch):
        step_fn(*state, batch)
        return state

    ckpt = flaxckpt.CheckpointManager(tmp_path / "run")
    objects = ckpt.restore_or_init(init_nnx)
    step_fn = nnx.jit(step_nnx)
    fresh = compiled(compilations, step, objects)
    ckpt.save(0, objects, wait=True)
    step_fn = nnx.jit(step_nnx)
    assert compiled(compilations, step, ckpt.restore_or_init(init_nnx)) <= fresh
    model, optimizer = init_nnx()
    assert ckpt.update(model, optimizer) == 0
    assert differences((model, optimizer), objects) == []
    step_fn = nnx.jit(step_nnx)
    assert compiled(compilations, step, (model, optimizer)) <= fresh
    ckpt.close()
