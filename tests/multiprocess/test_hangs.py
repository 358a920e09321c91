"""A process that hangs, fails or is slow: the others are told which one, and go on."""

import contextlib
import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import flaxckpt
from flaxckpt import errors
from flaxckpt.saving import writing
from flaxckpt.store import ocdbt
from tests import cluster, stores
from tests.multiprocess import jobs

TIMEOUT = 3
SLOW_SECS = 3.0


def saved_until_an_error(context, url, options, stopped):
    """Saves step 1; process `stopped` hangs in step 2. The error of the others, and how long."""
    with jobs.manager(url, options) as ckpt:
        ckpt.save(1, jobs.state(1), wait=True)
        if context.index == stopped:
            write_all = ocdbt.write_all

            def hang(*args):
                # Process 0 serves the keys. If it stopped before the others have read that step 2
                # is saved at all, they would fail in `save`, not in its background.
                for index in set(range(context.count)) - {stopped}:
                    cluster.wait_for_mark(context.dir, index, "training")
                context.mark("hangs")
                os.kill(os.getpid(), signal.SIGSTOP)
                write_all(*args)

            ocdbt.write_all = hang
        began = time.monotonic()
        with pytest.raises(errors.BackgroundSaveError) as caught:
            ckpt.save(2, jobs.state(2))
            context.mark("training")
            while time.monotonic() < began + 4 * TIMEOUT:
                time.sleep(0.05)
                ckpt._raise_failure()
        context.mark("told")
        cause = caught.value.__cause__
        return type(cause).__name__, str(caught.value), time.monotonic() - began


def end(stopped, count):
    """Ends the process that hangs when the others have been told, or have failed."""

    def during(pids, directory):
        with contextlib.suppress(TimeoutError):
            for index in set(range(count)) - {stopped}:
                cluster.wait_for_mark(directory, index, "told", timeout=5 * TIMEOUT)
        os.kill(pids[stopped], signal.SIGKILL)

    return during


@pytest.mark.parametrize(("stopped", "count"), [(0, 2), (1, 2), (2, 3)])
def test_a_process_that_hangs_is_named_by_the_others(stopped, count, tmp_path):
    store = stores.Disk(tmp_path)
    options = store.options(timeout_secs=TIMEOUT)
    results = cluster.run(
        saved_until_an_error,
        count,
        store.url("run"),
        options,
        stopped,
        check=False,
        heartbeat_timeout=100,
        during=end(stopped, count),
    )
    assert "hangs" in results[stopped].marks
    for index in set(range(count)) - {stopped}:
        assert results[index].value is not None, str(results[index])
        kind, text, seconds = results[index].value
        assert seconds < 3 * TIMEOUT
        assert "saving step 2 of" in text
        assert "run" in text
        assert f"process {stopped}" in text
        assert kind == "ProcessTimeoutError", text
        assert f"did not reach this barrier within {TIMEOUT} s" in text
    assert jobs.check_alone(store, "run", 1) == [1]
    # The next job saves that step, and nothing is left of the one that hung.
    cluster.run(save_once, 2, store.url("run"), options, 2)
    assert jobs.check_alone(store, "run", 2) == [1, 2]
    assert store.strays("run") == []


def save_once(context, url, options, step):
    with jobs.manager(url, options) as ckpt:
        ckpt.restore(jobs.state(0))
        ckpt.save(step, jobs.state(step))


def failed_and_saved_again(context, url, options, full):
    """The disk of process `full` is full in step 2; with room again, step 2 is saved."""
    write_all = ocdbt.write_all

    def fail(*args):
        raise OSError(28, os.strerror(28), "the disk")

    with jobs.manager(url, options) as ckpt:
        ckpt.save(1, jobs.state(1), wait=True)
        if context.index == full:
            ocdbt.write_all = fail
        began = time.monotonic()
        with pytest.raises(errors.BackgroundSaveError) as caught:
            ckpt.save(2, jobs.state(2), wait=True)
        seconds = time.monotonic() - began
        ocdbt.write_all = write_all
        assert ckpt.steps() == [1]
        ckpt.save(2, jobs.state(2), wait=True)
        ckpt.save(3, jobs.state(3))
    return str(caught.value), seconds


@pytest.mark.parametrize("kind", stores.ALL)
@pytest.mark.parametrize("full", [0, 1])
def test_a_full_disk_of_one_process_is_told_to_all_at_once(full, kind, tmp_path):
    with stores.opened(kind, tmp_path) as store:
        options = store.options(timeout_secs=60)
        results = cluster.run(
            failed_and_saved_again, 2, store.url("run"), options, full, env=store.env
        )
        for index, result in enumerate(results):
            text, seconds = result.value
            assert "No space left on device" in text
            assert "saving step 2" in text
            assert store.url("run") in text
            assert seconds < 20
            if index != full:
                assert f"process {full}" in text
        assert jobs.check_alone(store, "run", 3) == [1, 2, 3]
        assert store.strays("run") == []


def train_during_a_slow_save(context, url, options, slow):
    """Steps with a collective while the background of process `slow` takes its time."""
    mesh = jobs.mesh()
    rows = NamedSharding(mesh, PartitionSpec("x"))
    x = jax.make_array_from_callback((8, 64), rows, lambda index: np.ones((8, 64))[index])
    step = jax.jit(lambda x: x - 0.01 * jnp.mean(x), out_shardings=rows)
    x = step(x).block_until_ready()
    write_share = writing._write_shards

    def slowly(*args):
        context.mark("slow")
        time.sleep(SLOW_SECS)
        return write_share(*args)

    with jobs.manager(url, options) as ckpt:
        if context.index == slow:
            writing._write_shards = slowly
        began = time.monotonic()
        ckpt.save(1, {"x": x})
        for _ in range(100):
            x = step(x).block_until_ready()
        trained = time.monotonic() - began
        ckpt.wait()
        return trained, time.monotonic() - began


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_process_does_not_keep_the_others_from_training(slow, tmp_path):
    store = stores.Disk(tmp_path)
    results = cluster.run(train_during_a_slow_save, 2, store.url("run"), store.options(), slow)
    for result in results:
        trained, saved = result.value
        assert saved >= SLOW_SECS, "the save was not slow"
        assert trained < SLOW_SECS - 0.5, "the steps waited for the save"
    assert flaxckpt.CheckpointManager(tmp_path / "run").steps() == [1]
