"""Frequent saves to each host's own disk, and which step a restart takes."""

import logging
import shutil

import numpy as np
import pytest

from flaxckpt import CheckpointManager, Every
from flaxckpt.testing import differences
from tests import cluster, stores
from tests.multiprocess import jobs

pytestmark = pytest.mark.slow

PLACES = ["disk", "s3"]


@pytest.fixture(params=PLACES)
def store(request, tmp_path):
    with stores.opened(request.param, tmp_path) as store:
        yield store


def opened(store_url, options, local, **settings):
    """A run with a local step at every call, and one in the store at every fourth."""
    settings = {"save_every": Every(steps=4), "local_every": Every(steps=1)} | settings
    return CheckpointManager(store_url, local=local, options=options, **settings)


def state(step):
    return {"w": np.random.default_rng(step).standard_normal(2000), "step": step}


def local_steps(local, process=0):
    """The steps on the disk of a process."""
    return sorted(path.name for path in (local / f"process_{process}").iterdir())


# One process


def test_a_restart_takes_the_newest_local_step(store, tmp_path):
    url, options, local = store.url("run"), store.options(), tmp_path / "local"
    with opened(url, options, local) as ckpt:
        for step in range(1, 8):
            ckpt(step, state(step))
    assert CheckpointManager(url, options=options).steps() == [4]
    assert local_steps(local) == ["6", "7"], "two are kept"
    with opened(url, options, local) as ckpt:
        assert differences(ckpt.restore(), state(7)) == []
        assert str(ckpt.report.path) == str(local / "process_0" / "7")
        assert (ckpt.next_step, ckpt.restored_step) == (8, 7)
        # A step that is asked for is that of the run.
        assert differences(ckpt.restore(step=4), state(4)) == []
        assert str(ckpt.report.path) == f"{url}/4"


def test_a_newer_step_of_the_store_wins(store, tmp_path):
    url, options, local = store.url("run"), store.options(), tmp_path / "local"
    with opened(url, options, local) as ckpt:
        ckpt(1, state(1))
    with CheckpointManager(url, options=options) as ckpt:
        ckpt.save(2, state(2))
    with opened(url, options, local) as ckpt:
        assert differences(ckpt.restore(), state(2)) == []
        assert str(ckpt.report.path) == f"{url}/2"


def test_a_disk_that_was_wiped(store, tmp_path):
    url, options, local = store.url("run"), store.options(), tmp_path / "local"
    with opened(url, options, local) as ckpt:
        for step in range(1, 7):
            ckpt(step, state(step))
    shutil.rmtree(local)
    with opened(url, options, local) as ckpt:
        assert differences(ckpt.restore(), state(4)) == []
        assert str(ckpt.report.path) == f"{url}/4"


def test_a_damaged_local_step_is_said_and_the_store_is_used(store, tmp_path, caplog):
    url, options, local = store.url("run"), store.options(), tmp_path / "local"
    with opened(url, options, local) as ckpt:
        for step in range(1, 7):
            ckpt(step, state(step))
    (local / "process_0/6/state/manifest.ocdbt").write_bytes(b"")
    with caplog.at_level(logging.WARNING, "flaxckpt"), opened(url, options, local) as ckpt:
        assert differences(ckpt.restore(), state(4)) == []
    assert "local step 6 is not used, process 0 cannot restore it" in caplog.text


def test_restore_or_init_with_local_steps_only(store, tmp_path):
    url, options, local = store.url("run"), store.options(), tmp_path / "local"
    with opened(url, options, local) as ckpt:
        made = ckpt.restore_or_init(lambda: state(0))
        assert ckpt.last_step is None
        ckpt(1, made | {"step": 1})
    assert CheckpointManager(url, options=options).steps() == []
    with opened(url, options, local) as ckpt:
        assert ckpt.restore_or_init(lambda: state(0))["step"] == 1
        assert ckpt.last_step == 1


def test_what_was_left_half_written_is_removed(store, tmp_path):
    url, options, local = store.url("run"), store.options(), tmp_path / "local"
    (result,) = cluster.run(die_in_a_local_save, 1, url, options, local, env=store.env, check=False)
    assert result.returncode == -9
    assert len(local_steps(local)) == 2
    with opened(url, options, local) as ckpt:
        assert ckpt.restore()["step"] == 1
        assert local_steps(local) == ["1"]


def die_in_a_local_save(context, url, options, local):
    from flaxckpt.saving import writing

    with opened(url, options, local) as ckpt:
        ckpt(1, state(1))
        ckpt.wait()
        writing._write_metadata = lambda *args: context.die()
        ckpt(2, state(2))


# Several processes


def train(context, url, options, local, steps, own=True):
    """Saves `steps`; the disk of each host is its own."""
    with opened(url, options, local / (f"host{context.index}" if own else "")) as ckpt:
        for step in steps:
            ckpt(step, jobs.state(step))


def restored(context, url, options, local):
    """Where the newest step came from, after a look at all of its bits, and what was logged."""
    logging.getLogger("flaxckpt").addHandler(logging.StreamHandler())
    with opened(url, options, local / f"host{context.index}") as ckpt:
        found = ckpt.restore(jobs.state(0))
        jobs.check(found, ckpt.restored_step)
        return str(ckpt.report.path), ckpt.restored_step


def test_processes_take_the_newest_local_step_that_all_have(store, tmp_path):
    url, options, env = store.url("run"), store.options(), store.env
    cluster.run(train, 2, url, options, tmp_path, range(1, 7), env=env)
    results = cluster.run(restored, 2, url, options, tmp_path, env=env)
    paths = [str(tmp_path / f"host{i}" / f"process_{i}" / "6") for i in range(2)]
    assert [result.value for result in results] == [(path, 6) for path in paths]
    # One of them lacks it: the one before it, which both have, is as good.
    shutil.rmtree(paths[1])
    results = cluster.run(restored, 2, url, options, tmp_path, env=env)
    assert {result.value[1] for result in results} == {5}
    # One has none.
    shutil.rmtree(tmp_path / "host1")
    results = cluster.run(restored, 2, url, options, tmp_path, env=env)
    assert {result.value for result in results} == {(f"{url}/4", 4)}


def test_local_steps_of_two_attempts_are_not_mixed(tmp_path):
    store = stores.Disk(tmp_path)
    url, options = store.url("run"), store.options()
    cluster.run(train, 2, url, options, tmp_path, range(1, 7))
    shutil.copytree(tmp_path / "host1", tmp_path / "old")
    shutil.rmtree(tmp_path / "host0")
    shutil.rmtree(tmp_path / "host1")
    # The same steps once more; then one host has the disk of the first attempt.
    cluster.run(train, 2, url, options, tmp_path, range(5, 7))
    shutil.rmtree(tmp_path / "host1")
    shutil.move(tmp_path / "old", tmp_path / "host1")
    assert local_steps(tmp_path / "host0") == local_steps(tmp_path / "host1", 1) == ["5", "6"]
    results = cluster.run(restored, 2, url, options, tmp_path)
    assert {result.value for result in results} == {(f"{url}/4", 4)}


def test_other_devices_than_those_that_saved_take_the_store_and_say_why(tmp_path):
    store = stores.Disk(tmp_path)
    url, options = store.url("run"), store.options()
    cluster.run(train, 2, url, options, tmp_path, range(1, 7))
    # One process alone needs what the other has.
    (alone,) = cluster.run(restored, 1, url, options, tmp_path)
    assert alone.value == (f"{url}/4", 4)
    assert "local step 6 is not used, process 0 cannot restore it: " in alone.log
