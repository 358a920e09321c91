"""What the processes of a job train: a state of every kind of leaf, known for each step."""

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import flaxckpt

ROWS, WIDTH = 12, 700


def values(step):
    """The arrays of the state at `step`, each as a whole."""
    numbers = np.random.default_rng(step)
    return {
        "rows": numbers.standard_normal((ROWS, WIDTH), np.float32),
        "whole": numbers.integers(0, 1 << 30, 500, np.int32),
        "host": np.full(3, step),
    }


def mesh():
    """All devices of all processes, in a row."""
    return jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))


def state(step):
    """The state at `step`: spread over all processes, the same on all, of the host, and numbers."""
    made = values(step)
    where = {"rows": PartitionSpec("x"), "whole": PartitionSpec()}
    for name, spec in where.items():
        whole, sharding = made[name], NamedSharding(mesh(), spec)
        made[name] = jax.make_array_from_callback(whole.shape, sharding, lambda i, w=whole: w[i])
    return made | {"step": step, "text": f"step {step}"}


def check(restored, step):
    """Compares what this process has of a restored state with the one that was saved."""
    assert (restored["step"], restored["text"]) == (step, f"step {step}")
    for name, whole in values(step).items():
        found = restored[name]
        shards = getattr(found, "addressable_shards", None)
        parts = [(s.index, np.asarray(s.data)) for s in shards] if shards else [(..., found)]
        for index, data in parts:
            assert data.dtype == whole.dtype
            np.testing.assert_array_equal(data, whole[index], err_msg=f"{name} of step {step}")


def manager(store_url, options, **settings):
    """The manager of a run."""
    return flaxckpt.CheckpointManager(store_url, options=options, **settings)


def check_alone(store, run, newest):
    """This process, alone: the newest step is `newest`, it and the one before it are whole."""
    options = store.options()
    reader = manager(store.url(run), options, read_only=True)
    steps = reader.steps()
    assert steps[-1] == reader.latest_step() == newest
    for step in steps[-2:]:
        report = flaxckpt.verify(f"{store.url(run)}/{step}", options=options)
        assert report.problems == ()
    check(reader.restore(as_numpy=True), newest)
    return steps
