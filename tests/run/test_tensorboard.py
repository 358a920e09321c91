"""The metric that decides which steps are best, from what an evaluation writes for TensorBoard."""

from __future__ import annotations

import contextlib
import math
import sys
import time

import numpy as np
import pytest

import flaxckpt
from flaxckpt import Keep, Options, metric_from_tensorboard

pytest.importorskip("tensorboard", reason="tensorboard is not installed")
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

FAST = Options(fsync=False)
STATE = {"w": np.ones(2)}


class Events:
    """Writes scalars as TensorBoard itself and PyTorch do, without TensorFlow."""

    def __init__(self, directory, suffix=""):
        self._writer = EventFileWriter(str(directory), filename_suffix=suffix)

    def __call__(self, step, value, tag="eval/loss", wall_time=None):
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        now = time.time() if wall_time is None else wall_time
        self._writer.add_event(Event(step=step, wall_time=now, summary=summary))
        self._writer.flush()

    def close(self):
        self._writer.close()


@pytest.fixture
def events(tmp_path):
    """Makes writers into directories below `tmp_path/logs`."""
    with contextlib.ExitStack() as stack:

        def make(*args, **kwargs):
            writer = Events(tmp_path.joinpath("logs", *args), **kwargs)
            stack.callback(writer.close)
            return writer

        yield make


@pytest.fixture
def metric(tmp_path):
    return metric_from_tensorboard("eval/loss", tmp_path / "logs")


def manager(tmp_path, metric, **settings):
    how = {"async_": False, "options": FAST} | settings
    rules = how.pop("rules", {"last": 1, "best": 1}) | {"mode": how.pop("mode", "min")}
    keep = Keep(metric=metric, **rules)
    return flaxckpt.CheckpointManager(tmp_path / "run", keep=keep, **how)


# What is read


def test_each_step_has_its_value(events, metric):
    write = events()
    write(10, 0.5)
    write(20, 0.25)
    write(20, 7.0, tag="eval/accuracy")
    write(30, 7.0, tag="loss")
    assert metric() == {10: 0.5, 20: 0.25}


def test_the_later_value_wins(events, metric):
    write = events()
    for step, value in [(1, 0.5), (2, 0.25), (1, 0.75), (3, 2.0)]:
        write(step, value)
    assert metric() == {1: 0.75, 2: 0.25, 3: 2.0}


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("b", "a")])
def test_of_two_directories_the_later_value_wins(first, second, events, metric):
    """An evaluation that was made again, elsewhere."""
    events(first)(5, 1.0, wall_time=1000.0)
    events(second)(5, 2.0, wall_time=2000.0)
    assert metric() == {5: 2.0}


def test_directories_below_are_read_too(events, metric):
    events()(1, 1.0)
    events("eval", "deep")(2, 2.0)
    events("test")(3, 3.0)
    assert metric() == {1: 1.0, 2: 2.0, 3: 3.0}


@pytest.mark.parametrize("there", [True, False])
def test_before_anything_is_written_there_are_no_values(there, tmp_path, metric):
    if there:
        (tmp_path / "logs").mkdir()
    assert metric() == {}


def test_what_is_written_later_is_seen(events, metric):
    write = events("a")
    write(1, 1.0)
    assert metric() == {1: 1.0}
    write(2, 2.0)
    events("b")(3, 3.0)
    assert metric() == {1: 1.0, 2: 2.0, 3: 3.0}


def test_a_restarted_evaluation_writes_another_file(events, metric):
    write = events(suffix=".1")
    write(1, 1.0)
    assert metric() == {1: 1.0}
    write.close()
    again = events(suffix=".2")
    again(1, 5.0)
    again(2, 2.0)
    assert metric() == {1: 5.0, 2: 2.0}


def test_two_writers_may_write_into_one_directory(events, metric):
    """The training and the evaluation, in turns."""
    evaluation, training = events(suffix=".1"), events(suffix=".2")
    for step in range(4):
        training(step, 9.0, tag="train/loss")
        evaluation(step, float(step))
        assert metric() == {before: float(before) for before in range(step + 1)}


def test_nan_is_a_value(events, metric):
    write = events()
    write(1, math.nan)
    write(2, math.inf)
    found = metric()
    assert sorted(found) == [1, 2]
    assert math.isnan(found[1])
    assert found[2] == math.inf


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_record_that_is_half_written_is_read_when_it_is_whole(cut, events, tmp_path):
    write = events()
    write(1, 1.0)
    write(2, 2.0)
    write.close()
    (file,) = (tmp_path / "logs").iterdir()
    whole = file.read_bytes()
    torn = tmp_path / "torn" / file.name
    torn.parent.mkdir()
    torn.write_bytes(whole[:-cut])
    metric = metric_from_tensorboard("eval/loss", tmp_path / "torn")
    assert metric() == {1: 1.0}
    with torn.open("ab") as growing:
        growing.write(whole[-cut:])
    assert metric() == {1: 1.0, 2: 2.0}


def test_without_tensorboard_it_is_an_error_at_once(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ModuleNotFoundError, match="tensorboard"):
        metric_from_tensorboard("eval/loss", tmp_path)


# What clu writes


@pytest.fixture
def clu(tmp_path):
    """The writer of clu, into `tmp_path/logs`; it writes scalars as tensors."""
    pytest.importorskip("tensorflow", reason="TensorFlow, with which clu writes, is not installed")
    from clu import metric_writers

    with contextlib.closing(metric_writers.SummaryWriter(str(tmp_path / "logs"))) as writer:
        yield writer


def test_what_clu_writes_is_read(clu, events, metric, tmp_path):
    clu.write_scalars(1, {"eval/loss": 0.5, "eval/accuracy": 0.9})
    clu.write_scalars(2, {"eval/loss": math.nan})
    clu.write_histograms(2, {"weights": np.ones(5)})
    clu.write_images(2, {"image": np.ones((1, 4, 4, 3))})
    clu.write_texts(2, {"text": "words"})
    clu.flush()
    found = metric()
    assert (sorted(found), found[1]) == ([1, 2], 0.5)
    assert math.isnan(found[2])
    clu.write_scalars(3, {"eval/loss": 0.25})
    clu.write_scalars(1, {"eval/loss": 0.125})
    clu.flush()
    events("other")(4, 4.0)
    found = metric()
    assert {step: found[step] for step in (1, 3, 4)} == {1: 0.125, 3: 0.25, 4: 4.0}
    for tag in ("weights", "text", "image"):  # not something that float() makes of it
        with pytest.raises(ValueError, match=tag):
            metric_from_tensorboard(tag, tmp_path / "logs")()


def test_a_run_with_clu(clu, metric, tmp_path):
    """The evaluation of a step comes after its save."""
    with manager(tmp_path, metric) as ckpt:
        for step, loss in enumerate([0.5, 0.25, 0.75, 1.0]):
            ckpt.save(step, STATE)
            clu.write_scalars(step, {"eval/loss": loss})
            clu.flush()
        assert ckpt.best_step() == 1
        assert ckpt.steps() == [1, 3]
        ckpt.save(4, STATE)
        ckpt.save(5, STATE)
        assert ckpt.steps() == [1, 4, 5]  # 4 has no value yet


# What is kept


def test_a_step_is_kept_until_its_value_is_written(events, metric, tmp_path):
    write = events()
    with manager(tmp_path, metric) as ckpt:
        for step in range(3):
            ckpt.save(step, STATE)
        assert ckpt.steps() == [0, 1, 2]
        assert ckpt.best_step() is None
        write(1, 3.0)
        ckpt.save(3, STATE)
        assert ckpt.steps() == [0, 1, 2, 3]
        write(0, 5.0)
        ckpt.save(4, STATE)
        assert (ckpt.steps(), ckpt.best_step()) == ([1, 2, 3, 4], 1)
        for step, loss in ((2, 4.0), (3, 1.0)):
            write(step, loss)
        ckpt.save(5, STATE)
        assert (ckpt.steps(), ckpt.best_step()) == ([3, 4, 5], 3)


def test_a_step_whose_value_is_written_again_is_judged_by_that(events, metric, tmp_path):
    write = events()
    with manager(tmp_path, metric) as ckpt:
        ckpt.save(0, STATE)
        ckpt.save(1, STATE)
        write(0, 1.0)
        write(1, 2.0)
        assert ckpt.best_step() == 0
        write(0, 3.0)
        ckpt.save(2, STATE)
        assert (ckpt.steps(), ckpt.best_step()) == ([1, 2], 1)


def test_nan_is_never_best_and_keeps_nothing(events, metric, tmp_path):
    write = events()
    with manager(tmp_path, metric) as ckpt:
        ckpt.save(0, STATE)
        ckpt.save(1, STATE)
        write(0, math.nan)
        write(1, 7.0)
        ckpt.save(2, STATE)
        assert (ckpt.steps(), ckpt.best_step()) == ([1, 2], 1)


def test_the_largest_may_be_best(events, metric, tmp_path):
    write = events()
    for step, value in enumerate([1.0, 3.0, 2.0]):
        write(step, value)
    with manager(tmp_path, metric, mode="max", async_=True) as ckpt:
        for step in range(4):
            ckpt.save(step, STATE)
        ckpt.wait()
        assert (ckpt.steps(), ckpt.best_step()) == ([1, 3], 1)


def test_values_of_steps_that_are_not_there_do_no_harm(events, metric, tmp_path):
    write = events()
    for step in range(0, 100, 3):
        write(step, float(-step))
    with manager(tmp_path, metric) as ckpt:
        for step in (3, 4, 6, 7):
            ckpt.save(step, STATE)
        assert (ckpt.steps(), ckpt.best_step()) == ([4, 6, 7], 6)


def test_an_evaluator_asks_for_the_best_step(events, metric, tmp_path):
    with manager(tmp_path, None, rules={}) as ckpt:
        for step in range(3):
            ckpt.save(step, STATE)
    write = events()
    reader = manager(tmp_path, metric, rules={}, read_only=True)
    assert reader.best_step() is None
    write(1, 1.0)
    assert reader.best_step() == 1
    write(2, 0.5)
    assert reader.best_step() == 2


def test_the_metrics_of_the_save_do_not_decide(events, metric, tmp_path):
    write = events()
    with manager(tmp_path, metric) as ckpt:
        ckpt.save(0, STATE, metrics={"a": 1.0, "b": 5.0})
        ckpt.save(1, STATE, metrics={"eval/loss": 0.0})
        write(0, 1.0)
        write(1, 2.0)
        ckpt.save(2, STATE, metrics={"a": 0.0})
        assert (ckpt.steps(), ckpt.best_step()) == ([0, 2], 0)
        assert ckpt.metrics(0) == {"a": 1.0, "b": 5.0}
