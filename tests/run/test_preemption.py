"""Saving before the machine is taken away."""

import os
import signal
import time

import pytest

import flaxckpt  # `PeriodicCheckpoint` of it, which takes seconds to import, only where it is used
from flaxckpt import CheckpointManager, Every, errors, on_preemption
from tests import cluster
from tests.multiprocess import jobs

pytestmark = pytest.mark.slow

RARELY = Every(steps=1000)
STEPS = 400


@pytest.fixture
def ckpt(tmp_path):
    with CheckpointManager(tmp_path / "run", save_every=RARELY) as ckpt:
        yield ckpt


def test_a_signal_makes_the_next_call_save_and_the_loop_end(ckpt):
    with on_preemption(ckpt):
        assert not ckpt(1, {"step": 1})
        signal.raise_signal(signal.SIGTERM)
        assert not ckpt.preempted
        assert ckpt(2, {"step": 2})
        assert ckpt.preempted
        assert not ckpt(3, {"step": 3}), "it asks once"
        assert ckpt.preempted
    ckpt.wait()
    assert ckpt.steps() == [2]
    assert ckpt.restore() == {"step": 2}


def test_the_hook_saves_too(ckpt):
    hook = flaxckpt.PeriodicCheckpoint(ckpt, every_steps=1000)
    with on_preemption(ckpt):
        assert not hook(1, state={"step": 1})
        signal.raise_signal(signal.SIGTERM)
        assert hook(2, state={"step": 2})
    assert ckpt.preempted
    ckpt.wait()
    assert ckpt.steps() == [2]


def test_other_signals_and_the_handlers_that_were_there_before(ckpt):
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    try:
        ours = signal.getsignal(signal.SIGTERM)
        with pytest.raises(KeyError), on_preemption(ckpt, [signal.SIGTERM, signal.SIGUSR1]):
            signal.raise_signal(signal.SIGUSR1)
            raise KeyError
        assert heard == []
        assert signal.getsignal(signal.SIGTERM) == ours
        signal.raise_signal(signal.SIGUSR1)
        assert heard == [1]
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ckpt(1, {"step": 1})
    assert ckpt.preempted


def test_without_a_signal_nothing_happens(ckpt):
    with on_preemption(ckpt):
        assert not ckpt(1, {"step": 1})
    assert not ckpt.preempted
    assert ckpt.steps() == []


def refused(context, directory):
    with pytest.raises(errors.ManagerError, match="jax handles SIGTERM"):
        with on_preemption(CheckpointManager(directory)):
            pytest.fail("it would disable jax's own handler")


def train(context, directory, use_hook):
    """Steps until the job is preempted; which step that was, and where it began."""
    with CheckpointManager(directory, save_every=RARELY) as ckpt:
        begin = ckpt.next_step
        if begin:
            jobs.check(ckpt.restore(jobs.state(0)), begin - 1)
        hook = flaxckpt.PeriodicCheckpoint(ckpt, every_steps=1000) if use_hook else None
        for step in range(begin, begin + STEPS):
            if step == begin + 5:
                context.mark("training")
            if hook:
                hook(step + 1, state=jobs.state(step + 1))
            else:
                ckpt(step + 1, jobs.state(step + 1))
            if ckpt.preempted:
                break
            time.sleep(0.005)
        return step + 1, ckpt.preempted, begin


def preempt(index):
    def during(pids, directory):
        cluster.wait_for_mark(directory, index, "training")
        os.kill(pids[index], signal.SIGTERM)

    return during


def test_it_is_refused_where_jax_has_a_handler(tmp_path):
    cluster.run(refused, 1, tmp_path / "run")


@pytest.mark.parametrize(
    ("count", "index", "use_hook"), [(2, 0, False), (2, 1, True), (1, 0, False)]
)
def test_all_processes_save_one_step_when_one_is_to_end(count, index, use_hook, tmp_path):
    results = cluster.run(train, count, tmp_path / "run", use_hook, during=preempt(index))
    (ended,) = {result.value for result in results}
    step, preempted, begin = ended
    assert preempted
    assert begin == 0
    assert flaxckpt.CheckpointManager(tmp_path / "run").steps() == [step]
    # The next job resumes there.
    results = cluster.run(train, count, tmp_path / "run", False, during=preempt(0))
    assert {result.value[2] for result in results} == {step + 1}


def train_without_the_service(context, directory):
    """As when `jax_enable_preemption_service` was off, which is looked at when jax is started."""
    from jax._src.distributed import global_state

    global_state.preemption_sync_manager = None
    with CheckpointManager(directory, save_every=Every(steps=2)) as ckpt:
        for step in range(1, 5):
            ckpt(step, jobs.state(step))
        return ckpt.preempted


def test_without_jaxs_service_nobody_is_preempted(tmp_path):
    results = cluster.run(train_without_the_service, 2, tmp_path / "run")
    assert [result.value for result in results] == [False, False]
    assert CheckpointManager(tmp_path / "run").steps() == [2, 4]
