"""The CLU hook: beside the real clu, and without TensorFlow."""

import jax.numpy as jnp
import pytest

import flaxckpt
from flaxckpt.errors import BackgroundSaveError
from tests.processes import run_fresh

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

STATE = {"x": 1}


@pytest.fixture
def ckpt(tmp_path):
    with flaxckpt.CheckpointManager(tmp_path / "run") as manager:
        yield manager


def fired(hook, steps, **kwargs):
    return [step for step in steps if hook(step, state=STATE, **kwargs)]


def test_it_is_a_real_periodic_action(ckpt):
    from clu import periodic_actions

    hook = flaxckpt.PeriodicCheckpoint(ckpt, every_steps=5)
    assert isinstance(hook, periodic_actions.PeriodicAction)


def test_in_a_hooks_list_next_to_report_progress(ckpt):
    from clu import metric_writers, periodic_actions

    writer = metric_writers.LoggingWriter()
    state = {"step": -1}
    hooks = [
        flaxckpt.PeriodicCheckpoint(ckpt, every_steps=4, on_steps=[9], state_fn=lambda: state),
        periodic_actions.ReportProgress(num_train_steps=10, every_steps=2, writer=writer),
    ]
    for step in range(10):
        state = {"step": step}
        for hook in hooks:
            hook(step)
    ckpt.wait()
    assert ckpt.steps() == [0, 4, 8, 9]
    assert ckpt.restore(step=8) == {"step": 8}


@pytest.mark.parametrize(
    ("every", "steps", "expected"),
    [
        (5, range(12), [0, 5, 10]),
        (5, [7, 8, 9, 10, 11], [10]),
        (5, [5, 6], [5]),
        (5, [3, 7, 8, 21, 22], [7, 21]),
        (5, [5, 5, 4, 10, 10], [5, 10]),
    ],
)
def test_every_steps(ckpt, every, steps, expected):
    hook = flaxckpt.PeriodicCheckpoint(ckpt, every_steps=every)
    assert fired(hook, steps) == expected


def test_every_secs_is_strictly_more_and_starts_at_the_first_call(ckpt):
    hook = flaxckpt.PeriodicCheckpoint(ckpt, every_secs=2)
    assert [step for step in range(10) if hook(step, float(step), state=STATE)] == [3, 6, 9]


def test_a_save_by_steps_resets_the_clock(ckpt):
    hook = flaxckpt.PeriodicCheckpoint(ckpt, every_steps=5, every_secs=3)
    assert [step for step in range(12) if hook(step, float(step), state=STATE)] == [0, 4, 5, 9, 10]


def test_on_steps_that_are_jumped_over_fire_at_the_next_call_with_a_warning(ckpt):
    hook = flaxckpt.PeriodicCheckpoint(ckpt, on_steps=[4, 6])
    assert not hook(2, state=STATE)
    with pytest.warns(UserWarning, match="from step 2 to 5 and never came by 4"):
        assert hook(5, state=STATE)
    assert hook(6, state=STATE)


def test_the_first_call_after_a_restore_does_not_save_again(tmp_path):
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        ckpt.save(5, STATE)
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        hook = flaxckpt.PeriodicCheckpoint(ckpt, every_steps=5)
        ckpt.restore()
        assert fired(hook, [5, 6, 9, 10]) == [10]


def test_a_step_may_be_a_jax_array(ckpt):
    hook = flaxckpt.PeriodicCheckpoint(ckpt, on_steps=[4])
    assert hook(jnp.asarray(4), state=STATE)


def test_without_a_state_it_says_so_at_the_first_call(ckpt):
    hook = flaxckpt.PeriodicCheckpoint(ckpt, every_steps=100)
    with pytest.raises(TypeError, match="state_fn="):
        hook(1)


def test_a_background_error_is_raised_by_the_next_call_even_when_none_is_due(ckpt):
    hook = flaxckpt.PeriodicCheckpoint(ckpt, every_steps=100)
    import shutil

    shutil.rmtree(ckpt.directory)
    assert hook(0, state=STATE)
    ckpt._writer.background._task.done.wait()
    with pytest.raises(BackgroundSaveError):
        hook(1, state=STATE)
    ckpt.directory.mkdir()


def test_it_works_without_tensorflow(tmp_path):
    code = """
        import sys
        sys.modules["tensorflow"] = None  # importing it now fails
        import flaxckpt
        with flaxckpt.CheckpointManager(sys.argv[1]) as ckpt:
            hook = flaxckpt.PeriodicCheckpoint(ckpt, every_steps=2, state_fn=lambda: {"x": 1})
            print([hook(step) for step in range(4)], type(hook).__mro__[1].__module__)
        print(ckpt.steps())
    """
    status, out, err = run_fresh(code, tmp_path / "run")
    assert status == 0, err
    assert out == "[True, False, True, False] flaxckpt.periodic\n[0, 2]\n"
