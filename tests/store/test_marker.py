"""Steps that become visible by a marker, for stores without an atomic rename."""

import shutil
import signal

import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from flaxckpt.store import layout, local
from flaxckpt.store.local import commit_by_marker
from tests.processes import run, start

OPTIONS = flaxckpt.Options(atomic_rename=False)
STATE = {"w": np.arange(1000.0), "s": "text"}


@pytest.fixture
def directory(tmp_path):
    with flaxckpt.CheckpointManager(tmp_path / "run", options=OPTIONS) as ckpt:
        ckpt.save(1, STATE)
        ckpt.save(2, STATE | {"s": "new"})
    return tmp_path / "run"


def test_a_run_is_saved_listed_verified_and_restored(directory):
    reader = flaxckpt.CheckpointManager(directory, read_only=True)
    assert reader.steps() == [1, 2]
    assert reader.restore()["s"] == "new"
    assert flaxckpt.verify(directory / "1").problems == ()
    assert (directory / "1" / layout.COMMIT_SUCCESS).exists()


def test_without_its_marker_a_step_is_none(directory):
    (directory / "2" / layout.COMMIT_SUCCESS).unlink()
    reader = flaxckpt.CheckpointManager(directory, read_only=True)
    assert reader.latest_step() == 1
    with pytest.raises(errors.CheckpointNotFoundError, match="being written, or its save never"):
        flaxckpt.restore(directory / "2")


def test_while_it_is_written_a_step_is_none_and_nobody_elses(tmp_path):
    with commit_by_marker(tmp_path / "1", "a" * 12, overwrite=False, fsync=True) as path:
        assert path == tmp_path / "1"
        with (
            pytest.raises(errors.StepExistsError, match="being written by another writer"),
            commit_by_marker(tmp_path / "1", "b" * 12, overwrite=False, fsync=True),
        ):
            pytest.fail("there are two writers")
        assert not flaxckpt.CheckpointManager(tmp_path).steps()
        assert path.exists()
    assert (path / layout.COMMIT_SUCCESS).read_text() == "a" * 12


def test_a_save_that_fails_leaves_nothing(tmp_path):
    with (
        pytest.raises(KeyError),
        commit_by_marker(tmp_path / "1", "a" * 12, overwrite=False, fsync=False),
    ):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_writer_whose_claim_was_taken_over_does_not_commit(tmp_path):
    """A zombie: its rubbish was removed, and the step claimed anew, while it was silent."""
    with (
        pytest.raises(errors.StepExistsError, match="claimed by another writer"),
        commit_by_marker(tmp_path / "1", "a" * 12, overwrite=False, fsync=False) as path,
    ):
        shutil.rmtree(path)
        path.mkdir()
        (path / layout.CLAIM).write_text("b" * 12 + " elsewhere")
    assert (path / layout.CLAIM).read_text().startswith("b")
    assert not (path / layout.COMMIT_SUCCESS).exists()


@pytest.mark.parametrize("part", [layout.COMMIT_SUCCESS, "state/manifest.ocdbt"])
def test_parts_of_two_attempts_are_never_taken_for_one(directory, part):
    if part == layout.COMMIT_SUCCESS:
        shutil.copy(directory / "1" / part, directory / "2" / part)
    else:
        shutil.rmtree(directory / "2/state/d")
        shutil.copytree(directory / "1/state/d", directory / "2/state/d")
        shutil.copy(directory / "1" / part, directory / "2" / part)
    with pytest.raises(
        errors.FlaxckptError, match="its save never ended|and its metadata of the save"
    ):
        flaxckpt.restore(directory / "2")
    assert flaxckpt.restore(directory / "1")["s"] == "text"


def test_a_committed_step_is_not_replaced(directory):
    with flaxckpt.CheckpointManager(directory, options=OPTIONS) as ckpt:
        ckpt.save(2, STATE, overwrite=True)
        with pytest.raises(errors.BackgroundSaveError, match="cannot be replaced safely"):
            ckpt.wait()
        assert ckpt.restore()["s"] == "new"
        ckpt.delete(2)
        ckpt.save(2, STATE)
        assert ckpt.restore()["s"] == "text"


def test_a_damaged_step_that_is_reached_again_is_saved_anew(directory):
    with flaxckpt.CheckpointManager(directory, options=OPTIONS) as ckpt:
        file = directory / "2/state/_METADATA"
        file.write_bytes(file.read_bytes()[:-40])
        with pytest.warns(UserWarning, match="skipping damaged step 2"):
            ckpt.restore(on_corrupt="previous")
        assert ckpt(2, STATE)
        assert ckpt.restore()["s"] == "text"


def test_deleting_begins_with_the_marker(directory, monkeypatch):
    monkeypatch.setattr(local, "remove_tree", lambda path: None)
    with flaxckpt.CheckpointManager(directory, options=OPTIONS) as ckpt:
        ckpt.delete(2)
        assert ckpt.steps() == [1]
    assert (directory / "2/state").exists()


def test_what_a_dead_writer_claimed_is_removed_and_what_a_living_one_did_is_not(tmp_path):
    code = """
        import signal, sys
        from pathlib import Path
        from flaxckpt.store.local import commit_by_marker
        with commit_by_marker(Path(sys.argv[1]) / "7", "a" * 12, overwrite=False, fsync=False):
            print("claimed", flush=True)
            signal.pause()
    """
    process = start(code, tmp_path)
    try:
        assert process.stdout.readline() == "claimed\n"
        flaxckpt.CheckpointManager(tmp_path, options=OPTIONS)
        assert (tmp_path / "7").exists()
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    flaxckpt.CheckpointManager(tmp_path, options=OPTIONS)
    assert not (tmp_path / "7").exists()


def test_killed_at_any_time_the_last_committed_step_is_whole(tmp_path):
    code = """
        import os, random, signal, sys, numpy as np, flaxckpt
        from flaxckpt.store import local
        options = flaxckpt.Options(atomic_rename=False)
        real, left = local.write_file, int(sys.argv[2])
        def write_file(path, data, *, fsync):
            global left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            real(path, data, fsync=fsync)
        with flaxckpt.CheckpointManager(sys.argv[1], options=options) as ckpt:
            if ckpt.next_step == 0:
                ckpt.save(0, {"w": np.zeros(1000)}, wait=True)
            local.write_file = write_file
            ckpt.save(ckpt.next_step, {"w": np.full(1000, ckpt.next_step)})
    """
    newest = 0
    for left in range(7):
        status, _, err = run(code, tmp_path / "run", left)
        assert status in (0, -signal.SIGKILL), err
        reader = flaxckpt.CheckpointManager(tmp_path / "run", read_only=True)
        newest += status == 0
        assert reader.latest_step() == newest
        assert (reader.restore()["w"] == newest).all()
    assert newest > 0


@pytest.mark.filterwarnings("ignore")
def test_orbax_reads_it_in_its_own_marker_mode(directory):
    import orbax.checkpoint as ocp
    from orbax.checkpoint.options import AtomicityMode, AtomicityOptions

    options = ocp.CheckpointManagerOptions(
        atomicity_options=AtomicityOptions(mode=AtomicityMode.COMMIT_FILE), read_only=True
    )
    (directory / "3").mkdir()
    shutil.copytree(directory / "2/state", directory / "3/state")
    shutil.copy(directory / "2/_CHECKPOINT_METADATA", directory / "3")
    manager = ocp.CheckpointManager(directory, options=options)
    assert manager.all_steps() == [1, 2]
    assert manager.restore(2)["state"]["s"] == "new"
