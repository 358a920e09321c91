"""A run of checkpoints, on real files, with a real background thread."""

import contextlib
import logging
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flaxckpt
from flaxckpt import errors
from flaxckpt.store import local
from flaxckpt.testing import differences

STATE = {"w": np.arange(4.0)}


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


@contextlib.contextmanager
def held_up(directory):
    """Saves into `directory` do not get on during the block: a save first locks the run."""
    with local.lock(directory, shared=False):
        yield


def test_a_loop_saves_when_due_and_resumes(run):
    with flaxckpt.CheckpointManager(run, save_every=flaxckpt.Every(steps=3)) as ckpt:
        saved = [step for step in range(ckpt.next_step, 8) if ckpt(step, {"step": step})]
    assert saved == [0, 3, 6]
    with flaxckpt.CheckpointManager(run) as ckpt:
        assert (ckpt.latest_step(), ckpt.next_step, ckpt.steps()) == (6, 7, [0, 3, 6])
        assert ckpt.restore() == {"step": 6}
        assert ckpt.restore(step=3) == {"step": 3}


def test_without_a_schedule_every_call_saves(run):
    with flaxckpt.CheckpointManager(run) as ckpt:
        assert [ckpt(step, STATE) for step in (0, 1, 5)] == [True, True, True]


def test_the_first_call_after_a_restore_does_not_save_again(run):
    with flaxckpt.CheckpointManager(run) as ckpt:
        ckpt.save(6, STATE)
    with flaxckpt.CheckpointManager(run, save_every=flaxckpt.Every(steps=3)) as ckpt:
        ckpt.restore()
        assert [ckpt(step, STATE) for step in (6, 7, 8, 9)] == [False, False, False, True]


def test_a_step_that_exists_is_never_saved_again(run):
    with flaxckpt.CheckpointManager(run) as ckpt:
        ckpt.save(5, {"x": 1})
    with flaxckpt.CheckpointManager(run) as ckpt:
        assert not ckpt(5, {"x": 2})
        with pytest.raises(errors.StepExistsError):
            ckpt.save(5, {"x": 2})
        assert ckpt.restore() == {"x": 1}
        ckpt.save(5, {"x": 2}, overwrite=True)
        assert ckpt.restore() == {"x": 2}


@pytest.mark.parametrize("step", [3, np.int64(3), np.array(3), jnp.asarray(3), jnp.uint32(3)])
def test_integers_of_any_kind_are_steps(step, run):
    with flaxckpt.CheckpointManager(run) as ckpt:
        assert ckpt(step, STATE)
    assert ckpt.steps() == [3]


@pytest.mark.parametrize(
    "step", [-1, 1.0, "1", None, True, math.nan, np.arange(2), jnp.asarray(1.0)]
)
def test_anything_else_is_not(step, run):
    with flaxckpt.CheckpointManager(run) as ckpt:
        for save in (ckpt, ckpt.save):
            with pytest.raises(errors.InvalidStepError):
                save(step, STATE)
    assert ckpt.steps() == []


def test_time_based_saves_use_the_clock(run):
    now = 0.0
    every = flaxckpt.Every(minutes=1)
    with flaxckpt.CheckpointManager(run, save_every=every, clock=lambda: now) as ckpt:
        saved = []
        for step in range(200):
            now = step * 1.0
            if ckpt(step, STATE):
                saved.append(step)
    assert saved == [61, 122, 183]


def test_steps_jumped_over_are_saved_late_with_a_warning(run):
    every = flaxckpt.Every(at=[4])
    with flaxckpt.CheckpointManager(run, save_every=every) as ckpt:
        assert not ckpt(3, STATE)
        with pytest.warns(UserWarning, match="from step 3 to 6 and never came by 4"):
            assert ckpt(6, STATE)


def test_one_save_in_flight_and_the_second_waits(run):
    with flaxckpt.CheckpointManager(run) as ckpt:
        with held_up(run):
            ckpt.save(0, {"x": 0})
            assert ckpt.steps() == []
        ckpt.save(1, {"x": 1})
        assert ckpt.steps()[:1] == [0]
    assert ckpt.steps() == [0, 1]


def test_skip_if_busy(run):
    with flaxckpt.CheckpointManager(run, if_busy="skip") as ckpt:
        with held_up(run):
            assert ckpt(0, STATE)
            assert not ckpt(1, STATE)
        ckpt.wait()
        assert ckpt(2, STATE)
    assert ckpt.steps() == [0, 2]


def test_latest_step_counts_committed_steps_only(run):
    with flaxckpt.CheckpointManager(run) as ckpt:
        ckpt.save(0, STATE, wait=True)
        with held_up(run):
            ckpt.save(1, STATE)
            assert ckpt.latest_step() == 0
            assert ckpt.next_step == 2
        ckpt.wait()
        assert ckpt.latest_step() == 1


def test_the_state_may_change_once_save_returns(run):
    array, device = np.arange(1000.0), jnp.arange(1000.0)
    linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    generator = np.random.default_rng(0)
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    state = (array, device, linear, generator)
    expected = (array.copy(), np.asarray(device).copy(), np.asarray(linear.kernel.get_value()))
    expected_draw = np.random.default_rng(0).random()
    with flaxckpt.CheckpointManager(run) as ckpt:
        with held_up(run):
            ckpt.save(0, state)
            array[:] = -1
            doubled = double(device)
            del device
            doubled.delete()
            linear.kernel.set_value(jnp.zeros((2, 2)))
            generator.random()
        restored = ckpt.restore(as_numpy=True)
    assert (restored[0] == expected[0]).all()
    assert (restored[1] == expected[1]).all()
    assert (restored[2]["kernel"].get_value() == expected[2]).all()
    assert restored[3].random() == expected_draw


def test_a_background_error_is_raised_by_the_next_call(run):
    ckpt = flaxckpt.CheckpointManager(run)
    ckpt.save(0, STATE, wait=True)
    shutil.rmtree(run)
    ckpt.save(1, STATE)
    ckpt._writer.background._task.done.wait()
    with pytest.raises(errors.BackgroundSaveError, match="saving step 1") as raised:
        ckpt(2, STATE)
    assert isinstance(raised.value.__cause__, FileNotFoundError)
    assert ckpt.last_error is raised.value.__cause__
    ckpt.close()


@pytest.mark.parametrize("call", ["wait", "close"])
def test_a_background_error_is_raised_by(call, run):
    ckpt = flaxckpt.CheckpointManager(run)
    shutil.rmtree(run)
    ckpt.save(1, STATE)
    with pytest.raises(errors.BackgroundSaveError):
        getattr(ckpt, call)()
    assert ckpt.steps() == []


def test_an_error_in_a_with_block_is_not_hidden_by_that_of_a_save(run, caplog):
    with (
        caplog.at_level(logging.ERROR, "flaxckpt"),
        pytest.raises(KeyError, match="the user's"),
        flaxckpt.CheckpointManager(run) as ckpt,
    ):
        shutil.rmtree(run)
        ckpt.save(1, STATE)
        raise KeyError("the user's")
    assert "saving step 1" in caplog.text


def test_synchronous_saves_raise_at_once(run):
    ckpt = flaxckpt.CheckpointManager(run, async_=False)
    shutil.rmtree(run)
    with pytest.raises(FileNotFoundError):
        ckpt.save(1, STATE)


def test_keep_best_and_last(run):
    keep = flaxckpt.Keep(last=1, best=2, mode="min")
    with flaxckpt.CheckpointManager(run, keep=keep) as ckpt:
        for step, loss in enumerate([0.3, 0.1, math.nan, 0.2, 0.5]):
            ckpt(step, STATE, metrics={"loss": loss})
        ckpt.wait()
        assert ckpt.steps() == [1, 3, 4]
        assert ckpt.best_step() == 1
        assert ckpt.metrics(3) == {"loss": 0.2}


def test_a_loop_that_went_back_keeps_what_it_saves(run):
    with flaxckpt.CheckpointManager(run, keep=flaxckpt.Keep(last=1, every=10)) as ckpt:
        for step in (10, 20, 30):
            ckpt.save(step, STATE)
        ckpt.restore(step=20)
        assert ckpt.next_step == 21
        ckpt.save(21, STATE, wait=True)
        assert ckpt.steps() == [10, 20, 21, 30]
        ckpt.save(22, STATE, wait=True)
        assert ckpt.steps() == [10, 20, 22, 30]


def test_the_timeout_is_an_error_and_the_save_goes_on(run):
    options = flaxckpt.Options(timeout_secs=0.05)
    ckpt = flaxckpt.CheckpointManager(run, options=options)
    with held_up(run):
        ckpt.save(0, STATE)
        with pytest.raises(errors.SaveTimeoutError, match="did not finish within 0.05 s and is"):
            ckpt.wait()
    ckpt._writer.background._task.done.wait(60)
    assert ckpt.steps() == [0]


def test_metadata_comes_back(run):
    with flaxckpt.CheckpointManager(run) as ckpt:
        ckpt.save(0, STATE, metadata={"git": "abc", "lr": [0.1, 2]}, wait=True)
        assert ckpt.metadata(0) == {"git": "abc", "lr": [0.1, 2]}
        with pytest.raises(errors.CheckpointNotFoundError):
            ckpt.metadata(1)


def test_a_step_that_somebody_else_deleted_is_no_error(run):
    with flaxckpt.CheckpointManager(run, keep=flaxckpt.Keep(last=1)) as ckpt:
        ckpt.save(0, STATE, wait=True)
        assert ckpt.steps() == [0]
        shutil.rmtree(run / "0")
        ckpt.save(1, STATE)
    assert ckpt.steps() == [1]


def test_after_a_failed_save_the_loop_may_save_the_step_again(run):
    ckpt = flaxckpt.CheckpointManager(run)
    ckpt.save(1, STATE, wait=True)
    aside = run.with_name("aside")
    run.rename(aside)
    ckpt.save(5, STATE)
    with pytest.raises(errors.BackgroundSaveError):
        ckpt.wait()
    aside.rename(run)
    assert (ckpt.last_step, ckpt.next_step) == (1, 2)
    assert ckpt(5, STATE)
    ckpt.close()
    assert ckpt.steps() == [1, 5]


@pytest.mark.parametrize(
    "options",
    [flaxckpt.Options(), flaxckpt.Options(chunk_bytes=32, max_host_bytes=512)],
    ids=["at once", "in rounds"],
)
def test_a_failed_save_does_not_keep_the_state(options, run, monkeypatch):
    import gc
    import weakref

    from flaxckpt.saving import snapshot

    taken = []

    def noting(data, real=snapshot._safe):
        copy = real(data)
        taken.append(weakref.ref(copy))
        return copy

    monkeypatch.setattr(snapshot, "_safe", noting)
    ckpt = flaxckpt.CheckpointManager(run, options=options)
    shutil.rmtree(run)
    with pytest.raises(errors.BackgroundSaveError):
        ckpt.save(1, {str(i): np.arange(4.0) for i in range(9)})
        ckpt.wait()
    gc.collect()
    assert taken
    assert [copy() for copy in taken if copy() is not None] == []
    assert isinstance(ckpt.last_error, FileNotFoundError)


def test_two_hooks_on_one_manager_save_a_step_once(run):
    with flaxckpt.CheckpointManager(run) as ckpt:
        hook = flaxckpt.PeriodicCheckpoint(ckpt, every_steps=5)
        with held_up(run):
            ckpt.save(5, STATE)
            assert not hook(5, state=STATE)


def test_a_hook_follows_a_restore_back(run):
    with flaxckpt.CheckpointManager(run) as ckpt:
        hook = flaxckpt.PeriodicCheckpoint(ckpt, every_steps=10)
        for step in (10, 20):
            assert hook(step, state=STATE)
        ckpt.restore(step=10)
        ckpt.delete(20)
        assert [hook(step, state=STATE) for step in (11, 20)] == [False, True]


def test_an_empty_directory_is_no_step(run):
    (run / "10").mkdir(parents=True)
    with flaxckpt.CheckpointManager(run) as ckpt:
        assert ckpt(10, STATE)
    assert ckpt.steps() == [10]


def test_a_run_that_is_a_file_has_no_steps(tmp_path):
    (tmp_path / "file").write_text("")
    assert flaxckpt.CheckpointManager(tmp_path / "file", read_only=True).steps() == []


def test_best_is_known_after_reopening(run):
    with flaxckpt.CheckpointManager(run, keep=flaxckpt.Keep(mode="max")) as ckpt:
        for step, accuracy in enumerate([0.3, jnp.float32(0.75), np.float64(0.2)]):
            ckpt(step, STATE, metrics={"accuracy": accuracy})
    assert flaxckpt.CheckpointManager(run, read_only=True).best_step() == 1


@pytest.mark.parametrize("value", ["low", None, [1, 2], jnp.ones(3), 1j])
def test_metrics_must_be_numbers(value, run):
    with flaxckpt.CheckpointManager(run) as ckpt:
        with pytest.raises(errors.InvalidMetricError, match="loss"):
            ckpt(0, STATE, metrics={"loss": value})
    assert ckpt.steps() == []


def test_several_metrics_need_a_name(run):
    metrics = {"loss": 1.0, "accuracy": 0.5}
    with flaxckpt.CheckpointManager(run, keep=flaxckpt.Keep(best=1, mode="min")) as ckpt:
        with pytest.raises(errors.InvalidMetricError, match="loss, accuracy"):
            ckpt(0, STATE, metrics=metrics)
        assert ckpt(1, STATE)
    keep = flaxckpt.Keep(best=1, metric="loss", mode="min")
    with flaxckpt.CheckpointManager(run, keep=keep) as ckpt:
        assert ckpt(2, STATE, metrics=metrics)


def test_metrics_that_are_not_finite_come_back(run):
    with flaxckpt.CheckpointManager(run) as ckpt:
        ckpt.save(0, STATE, metrics={"a": math.inf, "b": -math.inf, "c": math.nan}, wait=True)
        found = flaxckpt.CheckpointManager(run, read_only=True).metrics(0)
    assert (found["a"], found["b"]) == (math.inf, -math.inf)
    assert math.isnan(found["c"])


def test_pinned_steps_stay(run):
    with flaxckpt.CheckpointManager(run, keep=flaxckpt.Keep(last=1)) as ckpt:
        ckpt.save(0, STATE, wait=True)
        ckpt.pin(0)
        for step in (1, 2):
            ckpt.save(step, STATE)
        ckpt.wait()
        assert ckpt.steps() == [0, 2]
        with pytest.raises(errors.StepPinnedError):
            ckpt.delete(0)
        with pytest.raises(errors.StepPinnedError):
            ckpt.save(0, STATE, overwrite=True)
        ckpt.pin(0, pinned=False)
        ckpt.delete(0)
        assert ckpt.steps() == [2]


def test_what_flaxckpt_did_not_write_is_never_touched(run):
    foreign = ["7", "notes.txt", "3.orbax-checkpoint-tmp", "0x", "6", "data"]
    run.mkdir()
    for name in foreign:
        (run / name).mkdir()
        (run / name / "file").write_text("mine")
    (run / "6/_CLAIM").write_text("0123456789ab localhost")
    (run / "data/_CLAIM").write_text("")
    with flaxckpt.CheckpointManager(run, keep=flaxckpt.Keep(last=1)) as ckpt:
        for step in (8, 9):
            ckpt.save(step, STATE)
        with pytest.raises(
            errors.DirectoryError, match="7 exists but is not a flaxckpt checkpoint"
        ):
            ckpt.save(7, STATE, overwrite=True)
        ckpt.wait()
        assert ckpt.steps() == [9]
    assert all((run / name / "file").read_text() == "mine" for name in foreign)


def test_a_restore_of_what_is_not_there_says_what_is(run):
    with flaxckpt.CheckpointManager(run) as ckpt:
        with pytest.raises(errors.CheckpointNotFoundError, match="has no step. Check the path"):
            ckpt.restore()
        ckpt.save(3, STATE)
        with pytest.raises(errors.CheckpointNotFoundError, match="no step 4. It has 3."):
            ckpt.restore(step=4)


def test_read_only_creates_and_writes_nothing(run):
    reader = flaxckpt.CheckpointManager(run, read_only=True)
    assert reader.steps() == []
    assert reader.latest_step() is None
    assert not run.exists()
    with pytest.raises(errors.ManagerError, match="read-only"):
        reader.save(0, STATE)


def test_a_closed_manager_refuses(run):
    ckpt = flaxckpt.CheckpointManager(run)
    ckpt.close()
    ckpt.close()
    with pytest.raises(errors.ManagerError, match="closed"):
        ckpt.save(0, STATE)


def test_follow_yields_new_steps(run):
    reader = flaxckpt.CheckpointManager(run, read_only=True)
    with flaxckpt.CheckpointManager(run) as ckpt:
        ckpt.save(1, STATE, wait=True)
        following = reader.follow(timeout_secs=30, poll_secs=0.01)
        assert next(following) == 1
        ckpt.save(4, STATE)
        assert next(following) == 4
    assert list(reader.follow(timeout_secs=0, poll_secs=0.01)) == [1, 4]


def test_one_log_line_a_save(run, caplog):
    with caplog.at_level(logging.INFO, "flaxckpt"), flaxckpt.CheckpointManager(run) as ckpt:
        ckpt.save(0, STATE)
    lines = [r.getMessage() for r in caplog.records if r.name == "flaxckpt"]
    assert len(lines) == 1
    assert lines[0].startswith("saved step 0: 1 leaves, 0.0 MB in ")


def test_the_report_tells_what_was_restored(run):
    with flaxckpt.CheckpointManager(run) as ckpt:
        ckpt.save(0, {"step": 3, "w": np.zeros(2)})
        ckpt.restore({"step": jnp.asarray(0), "w": np.ones(2)})
    assert ckpt.report.restored == ("step", "w")
    assert ckpt.report.cast == (("step", "int", "int32[]"),)
    assert ckpt.report.nbytes == 24


def test_update_restores_nnx_objects_in_place(run):
    import optax

    def make(seed):
        model = nnx.Sequential(
            nnx.Linear(3, 4, rngs=nnx.Rngs(seed)), nnx.Dropout(0.5, rngs=nnx.Rngs(seed))
        )
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    model, optimizer = make(0)
    other, other_optimizer = make(1)
    kernel = other.layers[0].kernel
    with flaxckpt.CheckpointManager(run) as ckpt:
        assert ckpt.update(other, other_optimizer) is None
        ckpt.save(5, (model, optimizer))
        assert ckpt.update(other, other_optimizer) == 5
    assert other.layers[0].kernel is kernel
    assert differences((other, other_optimizer), (model, optimizer)) == []
    with pytest.raises(TypeError, match="dict"):
        ckpt.update({})
