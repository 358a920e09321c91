"""What is told of a run."""

import math

import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from flaxckpt.report.facts import Facts, ReportedSave, ReportedStep, gather, merged, saves_of
from flaxckpt.run.run import Run
from flaxckpt.store import layout
from tests.report import sample
from tests.stores import at


def of(directory, **how):
    return gather(Run(at(directory)), **how)


def test_the_time_between_saves_is_that_in_which_the_loop_trained():
    first, second = saves_of(sample.past(0, 10))
    # From 0.5 s after the call of the first, which was 2 s before it was committed.
    assert (first.trained, second.trained) == (None, 59.5)


def test_what_was_before_a_restart_is_not_taken_for_training():
    past = sample.past(0, 10, 20)
    past[1] = past[1]._replace(blocked_seconds=0.0)  # the last save of a process
    assert [save.trained for save in saves_of(past)] == [None, 59.5, None]
    assert [save.blocked for save in saves_of(past)] == [0.5, None, 0.5]


def test_what_makes_no_sense_is_left_out():
    past = sample.past(0, 10, 20, 30)
    past[1] = past[1]._replace(time=math.inf)
    past[2] = past[2]._replace(metrics={"loss": math.nan, "accuracy": 1.0})
    past[3] = past[3]._replace(time=past[0].time)  # the clock was set back
    found = saves_of(past)
    assert [save.step for save in found] == [0, 20, 30]
    assert found[1].metrics == {"accuracy": 1.0}
    assert found[2].trained is None


def test_steps_that_were_saved_and_are_not_there_are_deleted():
    saves = [ReportedSave(1, 10.0, 1.0), ReportedSave(2, 20.0, 1.0)]
    found = merged([ReportedStep(2, 21.0), ReportedStep(3, 30.0)], saves)
    assert [(s.step, s.time, s.is_kept) for s in found] == [
        (1, 10.0, False),
        (2, 21.0, True),
        (3, 30.0, True),
    ]


def test_the_best_step_is_one_that_is_kept():
    found = sample.facts()
    assert (found.best.step, found.nbytes) == (40, 4500)
    assert sample.facts(mode="max").best.step == 10
    assert sample.facts(metric=None).best is None
    assert sample.facts().overhead == (2.0, 238.0)
    assert sample.facts(saves=[]).overhead is None
    assert Facts("empty", [ReportedStep(1)]).span is None


def test_a_run_as_it_is_on_disk(tmp_path):
    run = tmp_path / "run"
    keep, w = flaxckpt.Keep(last=2, metric="loss", mode="min"), np.ones(3)
    with flaxckpt.CheckpointManager(run, keep=keep) as ckpt:
        for step in range(5):
            ckpt.save(step, {"w": w}, metrics={"loss": 5.0 - step}, wait=True)
            if step == 1:
                ckpt.pin(1)
    found = of(run)
    assert [s.step for s in found.steps] == [0, 1, 2, 3, 4]
    assert [s.step for s in found.kept] == [1, 3, 4]
    assert [s.step for s in found.steps if s.is_pinned] == [1]
    assert (found.metric, found.best.step, found.has_history) == ("loss", 4, True)
    assert found.steps[0].metrics == {"loss": 5.0}
    assert all(s.nbytes > 24 for s in found.kept)


def test_a_run_of_an_older_version_has_no_history(tmp_path):
    for step in (1, 2):
        flaxckpt.save(tmp_path / str(step), {"w": np.ones(3)})
    found = of(tmp_path)
    assert not found.has_history
    assert [s.is_kept for s in found.steps] == [True, True]


def test_a_damaged_step_is_there_and_nothing_more_is_said_of_it(tmp_path):
    for step in (1, 2):
        flaxckpt.save(tmp_path / str(step), {"w": np.ones(3)})
    (tmp_path / "2" / layout.CHECKPOINT_METADATA).write_text('{"flaxckpt": 1')
    found = of(tmp_path)
    assert [(s.step, s.is_damaged, s.time is None) for s in found.kept] == [
        (1, False, False),
        (2, True, True),
    ]
    assert [s.step for s in found.readable] == [1]


def test_a_metric_must_be_one_that_there_is(tmp_path):
    with flaxckpt.CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"w": 1.0}, metrics={"loss": 1.0, "accuracy": 0.5})
    assert of(tmp_path).metric is None
    assert "metrics accuracy, loss" in of(tmp_path).unranked
    assert of(tmp_path, metric="loss", mode="min").metric == "loss"
    with pytest.raises(errors.InvalidMetricError, match="The steps have accuracy, loss"):
        of(tmp_path, metric="los", mode="min")
    with pytest.raises(errors.InvalidMetricError, match="Pass --mode min or --mode max"):
        of(tmp_path, metric="loss")


def test_a_directory_without_steps_is_an_error(tmp_path):
    with pytest.raises(errors.CheckpointNotFoundError):
        of(tmp_path)
