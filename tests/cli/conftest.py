"""A run with all that a run may have, and a shell."""

import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import flaxckpt
from flaxckpt.store import layout
from flaxckpt.store.ocdbt import read_index
from tests.cli.shell import Shell
from tests.stores import at


def state(step):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    kernel = jnp.arange(8000.0).reshape(40, 200) + step
    sharded = jax.device_put(kernel, NamedSharding(mesh, PartitionSpec("data", None)))
    return {
        "params": {"dense": {"bias": jnp.zeros(200), "kernel": sharded}, "empty": {}},
        "rng": jax.random.key(step),
        "step": step,
        "text": "a",
    }


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A run of four steps: 1 is pinned, 2 is best, one was never finished, and foreign files."""
    run = tmp_path_factory.mktemp("made") / "run"
    losses = {1: 0.5, 2: 0.1, 3: float("nan"), 4: 0.25}
    keep = flaxckpt.Keep(metric="loss", mode="min")
    with flaxckpt.CheckpointManager(run, keep=keep, async_=False) as ckpt:
        for step, loss in losses.items():
            beside = {
                "metrics": {"loss": loss},
                "metadata": {"lang": "en"},
                "items": {"data": {"position": step}, "ema": {"w": np.arange(3) * step}},
            }
            ckpt.save(step, state(step), **beside)
        ckpt.pin(1)
    (run / layout.temporary_name("5", "0123456789ab")).mkdir()
    (run / layout.temporary_name("6", "0123456789ab", "elsewhere")).mkdir()
    (run / "events.out").touch()
    (run / "7").mkdir()
    return run


@pytest.fixture
def run_dir(made, tmp_path):
    """A copy of that run, to be changed."""
    return shutil.copytree(made, tmp_path / "run")


@pytest.fixture
def shell(capsys):
    return Shell(capsys)


def damage(checkpoint):
    """Flips a bit of a chunk of the kernel."""
    place = read_index(at(checkpoint / "state"))["params.dense.kernel/c/1/0"]
    with open(checkpoint / "state" / place.file, "r+b") as file:
        file.seek(place.offset)
        byte = file.read(1)[0]
        file.seek(place.offset)
        file.write(bytes([byte ^ 1]))


@pytest.fixture
def damaged(run_dir):
    """The same with a flipped bit in step 3."""
    damage(run_dir / "3")
    return run_dir


def without_ages(text):
    """Text in which no age is left."""
    return re.sub(r"\d+ (s|min|h|d)\b", "AGE", text)
