"""What saves and restores cost, and what a run remembers of its saves."""

from __future__ import annotations

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np

import flaxckpt
from flaxckpt.metadata.step_metadata import MAX_PAST
from flaxckpt.run import run as history_module
from flaxckpt.run import writer as writer_module
from flaxckpt.run.run import Run, history
from tests.stores import at

STATE = {"w": jnp.arange(1000.0)}
LINE = re.compile(
    r"saved step 3: 1 leaves, 0\.0 MB in \d+\.\d{3} s, \d+\.\d\d GB/s, \d+\.\d ms blocked, to .*/3"
)


class Scalars:
    """Keeps what is written to it, and by which call of the manager."""

    def __init__(self):
        self.written = []

    def write_scalars(self, step, scalars):
        self.written.append((step, scalars))


def test_a_save_is_one_line_with_all_that_it_cost(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "flaxckpt"):
        with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
            ckpt.save(3, STATE)
    (line,) = [r.getMessage() for r in caplog.records]
    assert LINE.fullmatch(line)


def test_nothing_is_written_to_the_standard_output(tmp_path, capfd):
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        ckpt.save(3, STATE)
        ckpt.restore(STATE)
    assert capfd.readouterr() == ("", "")


def test_the_scalars_of_a_save_come_with_the_next_call(tmp_path):
    scalars = Scalars()
    ckpt = flaxckpt.CheckpointManager(tmp_path / "run", writer=scalars)
    ckpt.save(3, STATE)
    ckpt.wait()
    ((step, found),) = scalars.written
    assert step == 3
    assert found["checkpoint/bytes"] == 4000
    assert found["checkpoint/seconds"] * 1e3 >= found["checkpoint/blocked_ms"] > 0
    assert found["checkpoint/gb_per_s"] * found["checkpoint/seconds"] * 1e9 == 4000
    ckpt.save(4, STATE)
    ckpt.close()
    assert [step for step, _ in scalars.written] == [3, 4]


def test_a_writer_of_clu(tmp_path):
    from clu.metric_writers import interface

    assert hasattr(interface.MetricWriter, "write_scalars")


def test_stats_add_up(tmp_path):
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        assert ckpt.stats() == flaxckpt.Stats()
        for step in (1, 2):
            ckpt.save(step, STATE, wait=True)
        ckpt.restore(STATE)
        stats = ckpt.stats()
    assert (stats.saves, stats.restores, stats.saved_bytes) == (2, 1, 8000)
    assert stats.last_save.step == 2
    assert stats.last_restore.nbytes == 4000
    assert stats.blocked_seconds > stats.last_save.blocked_seconds > 0


def test_the_monitoring_of_jax_hears_of_it(tmp_path):
    heard = {}

    def listen(name, seconds, **details):
        heard.setdefault(name, []).append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
            ckpt.save(1, STATE)
            ckpt.restore(STATE)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    ours = {name for name in heard if name.startswith("/flaxckpt/")}
    assert ours == {
        f"/flaxckpt/{w}/{n}" for w in ("save", "restore") for n in ("seconds", "blocked")
    }


# The past


def saves(run):
    return history(Run(at(run)))


def test_a_run_remembers_the_saves_whose_steps_are_gone(tmp_path):
    run = tmp_path / "run"
    keep = flaxckpt.Keep(last=1)
    with flaxckpt.CheckpointManager(run, keep=keep) as ckpt:
        for step in range(3):
            ckpt.save(step, STATE, metrics={"loss": 3.0 - step, "odd": np.nan})
    assert ckpt.steps() == [2]
    found = saves(run)
    assert [save.step for save in found] == [0, 1, 2]
    assert [save.metrics.get("loss") for save in found] == [3.0, 2.0, 1.0]
    assert all(save.nbytes == 4000 and save.leaves == 1 for save in found)
    assert [save.time for save in found] == sorted(save.time for save in found)
    assert all(save.seconds >= save.blocked_seconds > 0 for save in found[:2])


def test_the_next_manager_remembers_too(tmp_path):
    for step in range(3):
        with flaxckpt.CheckpointManager(tmp_path / "run", keep=flaxckpt.Keep(last=1)) as ckpt:
            ckpt.save(step, STATE)
    assert [save.step for save in saves(tmp_path / "run")] == [0, 1, 2]


def test_what_is_remembered_is_bounded(tmp_path, monkeypatch):
    assert MAX_PAST == 200
    monkeypatch.setattr(writer_module, "MAX_PAST", 3)
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        for step in range(6):
            ckpt.save(step, STATE)
    assert [save.step for save in saves(tmp_path / "run")] == [2, 3, 4, 5]


def test_a_run_without_a_readable_step_remembers_nothing(tmp_path):
    assert saves(tmp_path / "none") == ()
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        ckpt.save(1, STATE)
    (tmp_path / "run" / "1" / "state" / "_METADATA").write_bytes(b"{}")
    assert saves(tmp_path / "run") == ()
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        ckpt.save(2, STATE)
    assert [save.step for save in saves(tmp_path / "run")] == [2]
    assert history_module.history is history


def test_metadata_of_one_checkpoint(tmp_path):
    flaxckpt.save(tmp_path / "c", STATE, metadata={"note": "hello"})
    assert flaxckpt.lazy(tmp_path / "c").metadata == {"note": "hello"}
