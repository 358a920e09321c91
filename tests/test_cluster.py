"""The harness for several processes."""

import os
import signal
import time

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests import cluster

pytestmark = pytest.mark.slow


def add_up(context, factor):
    """The sum of a global array, and which devices there are."""
    mesh = Mesh(np.array(jax.devices()), "x")
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    numbers = np.arange(mesh.size, dtype=np.int32) * factor
    array = jax.make_array_from_callback(numbers.shape, sharding, lambda index: numbers[index])
    total = jax.shard_map(
        lambda shard: jax.lax.psum(shard, "x"),
        mesh=mesh,
        in_specs=PartitionSpec("x"),
        out_specs=PartitionSpec(),
    )(array)
    return int(total[0]), context.index, context.count, jax.local_device_count()


def meet_or_die(context):
    """Process 1 dies where the others would meet it."""
    print("here is", context.index)
    multihost_utils.sync_global_devices("start")
    if context.index == 1:
        context.mark("end")
        context.die()
    multihost_utils.sync_global_devices("meet")


def wait(context):
    context.mark("waiting")
    time.sleep(60)


def environment(context, *names):
    return [os.environ.get(name) for name in names]


def fail(context):
    print("about to fail")
    raise LookupError(f"in process {context.index}")


def return_a_lambda(context):
    return lambda: None


def test_processes_share_a_mesh():
    results = cluster.run(add_up, 2, 10, local_devices=2)
    assert [result.value for result in results] == [(60, 0, 2, 2), (60, 1, 2, 2)]
    assert [result.returncode for result in results] == [0, 0]


def test_a_process_that_dies_is_reported():
    survivor, victim = cluster.run(meet_or_die, 2, check=False)
    assert victim.returncode == -signal.SIGKILL
    assert (victim.value, victim.error, victim.killed) == (None, None, False)
    assert list(victim.marks) == ["end"]
    assert survivor.returncode
    assert "Gloo" in survivor.error
    assert "here is 0" in survivor.log


def test_the_test_can_kill_a_process_where_it_wants():
    def kill(pids, directory):
        cluster.wait_for_mark(directory, 1, "waiting")
        os.kill(pids[1], signal.SIGTERM)
        os.kill(pids[1], signal.SIGKILL)

    survivor, victim = cluster.run(wait, 2, during=kill, grace=0.2, check=False)
    assert (victim.returncode, victim.killed) == (-signal.SIGKILL, False)
    assert (survivor.returncode, survivor.killed) == (-signal.SIGKILL, True)


def test_a_process_that_hangs_is_killed():
    (result,) = cluster.run(wait, 1, timeout=1, check=False)
    assert (result.returncode, result.killed) == (-signal.SIGKILL, True)
    assert 0 < result.marks["waiting"] < 1 <= result.seconds


def test_the_environment_reaches_all_processes():
    env = {"AWS_ACCESS_KEY_ID": "someone"}
    results = cluster.run(environment, 2, *env, "MISSING", env=env)
    assert [result.value for result in results] == [["someone", None]] * 2


def test_a_failure_has_the_tracebacks_and_logs_of_all():
    with pytest.raises(cluster.WorkerFailure) as caught:
        cluster.run(fail, 2)
    message = str(caught.value)
    assert "LookupError: in process 0" in message
    assert "LookupError: in process 1" in message
    assert message.count("about to fail") == 2
    assert 'raise LookupError(f"in process {context.index}")' in message


def test_what_cannot_be_pickled_is_a_failure_of_the_body():
    (result,) = cluster.run(return_a_lambda, 1, check=False)
    assert result.returncode == 1
    assert "pickle" in result.error
