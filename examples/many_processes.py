"""A multi-process job that is preempted, and resumed by another number of processes.

Starts two processes of itself with two devices each, which train one linear model together. One
process receives a SIGTERM, as from a scheduler that preempts it; both save at the same step and
exit. Then one process with four devices resumes the run on a transposed mesh:
`python examples/many_processes.py --workdir /tmp/many_processes`.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import flaxckpt

STEPS = 400
MODEL = nn.Dense(
    8, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), ("data", "model"))
)


def init(key: jax.Array) -> TrainState:
    """The state before the first step."""
    params = MODEL.init(key, jnp.zeros((1, 16)))["params"]
    return TrainState.create(apply_fn=MODEL.apply, params=params, tx=optax.adam(1e-2))


def train(workdir: str, shape: tuple[int, int]) -> None:
    """One process of a job: trains to the end, or until the job is preempted."""
    mesh = jax.make_mesh(shape, ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)
    every = flaxckpt.Every(steps=100, at=[STEPS])
    with flaxckpt.CheckpointManager(workdir, save_every=every) as ckpt:
        state = ckpt.restore_or_init(init, jax.random.key(0), mesh=mesh)
        target = jnp.arange(128.0).reshape(16, 8) / 128

        def loss_fn(params: dict, x: jax.Array) -> jax.Array:
            return jnp.mean((MODEL.apply({"params": params}, x) - x @ target) ** 2)

        @jax.jit(donate_argnums=0, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, state))
        def train_step(state: TrainState, step: int) -> TrainState:
            x = jax.random.normal(jax.random.key(step), (64, 16))
            return state.apply_gradients(grads=jax.grad(loss_fn)(state.params, x))

        for step in range(ckpt.next_step, STEPS + 1):
            state = jax.block_until_ready(train_step(state, step))
            ckpt(step, state)
            if ckpt.preempted:
                break
            time.sleep(0.01)
    say = print if jax.process_index() == 0 else lambda text: None
    everywhere = NamedSharding(mesh, PartitionSpec())
    loss = jax.jit(loss_fn, out_shardings=everywhere)(state.params, jnp.eye(16))
    say(f"{'preempted' if ckpt.preempted else 'done'} at step {step}: loss {float(loss):.6f}")


def start(workdir: str, count: int, shape: str) -> list[subprocess.Popen]:
    """Starts a job of `count` processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, __file__, "--workdir", workdir, "--shape", shape, "--port", port]
    return [subprocess.Popen([*command, "--process", f"{i}/{count}"]) for i in range(count)]


def main(workdir: str, process: str, shape: str, port: str) -> None:
    """Runs both jobs, or one process of one."""
    if process:
        index, count = map(int, process.split("/"))
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 4 // count)
        here = f"127.0.0.1:{port}"
        jax.distributed.initialize(here, count, index, coordinator_bind_address=here)
        train(workdir, tuple(map(int, shape)))
        return
    job = start(workdir, 2, "22")
    while not os.path.exists(os.path.join(workdir, "100")):
        time.sleep(0.05)
    job[1].send_signal(signal.SIGTERM)
    for processes in (job, start(workdir, 1, "41")):
        assert [one.wait() for one in processes] == [0] * len(processes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", required=True)
    for option in ("--process", "--shape", "--port"):
        parser.add_argument(option, default="", help=argparse.SUPPRESS)
    main(**vars(parser.parse_args()))
