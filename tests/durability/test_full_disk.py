"""A disk that is really full: the caller is told, nothing is lost, and with room it goes on."""

import contextlib
import os
import time

import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from tests.durability import disks

PAGE = os.sysconf("SC_PAGESIZE")
DISK = 8 * disks.MIB


@pytest.fixture
def disk(tmp_path):
    with disks.tmpfs(tmp_path / "disk", DISK) as where:
        yield where


def state(step, size=50_000):
    return {"w": np.arange(size) + step, "b": np.full(3, step), "step": step, "text": ["a"]}


def assert_intact(run, steps, size=50_000):
    """The run has these steps, each whole, and nothing else."""
    reader = flaxckpt.CheckpointManager(run, read_only=True)
    assert reader.steps() == steps
    assert sorted(os.listdir(run)) == sorted(map(str, steps))
    for step in steps:
        assert flaxckpt.verify(run / str(step), strict=True)
        restored = reader.restore(step=step)
        assert (restored["w"] == state(step, size)["w"]).all()
        assert restored["b"].tolist() == [step] * 3
        assert (restored["step"], restored["text"]) == (step, ["a"])


def free_pages(disk):
    """How many pages are free."""
    found = os.statvfs(disk)
    return found.f_bfree * found.f_frsize // PAGE


def fill(disk, pages):
    """Fills the disk up to so many free pages."""
    with open(disk / "filler", "ab") as file:
        file.write(bytes((free_pages(disk) - pages) * PAGE))
    assert free_pages(disk) == pages


def save_fails(ckpt, step, value):
    """Saves; whether it failed, which the caller must have been told, with the reason."""
    try:
        ckpt.save(step, value)
        ckpt.wait()
    except (errors.BackgroundSaveError, OSError, ValueError) as error:
        failure = error
    else:
        return False
    assert "No space left on device" in str(failure)
    assert failure.__cause__ or not isinstance(failure, errors.BackgroundSaveError)
    return True


@pytest.mark.parametrize("async_", [False, True], ids=["sync", "async"])
def test_a_state_that_does_not_fit(async_, disk):
    with flaxckpt.CheckpointManager(disk / "run", async_=async_) as ckpt:
        ckpt.save(1, state(1), wait=True)
        too_big = state(2, size=2_000_000)
        if async_:
            ckpt.save(2, too_big)
            with pytest.raises(errors.BackgroundSaveError, match="No space left on device"):
                ckpt.wait()
        else:
            with pytest.raises(Exception, match="No space left on device"):
                ckpt.save(2, too_big)
        assert_intact(disk / "run", [1])
        ckpt.save(3, state(3), wait=True)
        assert_intact(disk / "run", [1, 3])


@pytest.mark.parametrize("async_", [False, True], ids=["sync", "async"])
def test_after_making_room_the_same_manager_saves_again(async_, disk):
    with flaxckpt.CheckpointManager(disk / "run", async_=async_) as ckpt:
        ckpt.save(1, state(1), wait=True)
        fill(disk, 20)
        assert save_fails(ckpt, 2, state(2))
        assert_intact(disk / "run", [1])
        assert free_pages(disk) == 20
        (disk / "filler").unlink()
        ckpt.save(2, state(2), wait=True)
        assert_intact(disk / "run", [1, 2])


def test_the_next_hook_call_tells(disk):
    with flaxckpt.CheckpointManager(disk / "run") as ckpt:
        ckpt(1, state(1))
        ckpt.wait()
        fill(disk, 20)
        ckpt(2, state(2))
        deadline = time.monotonic() + 60
        while ckpt.last_error is None and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(errors.BackgroundSaveError, match="saving step 2 .* No space left"):
            ckpt(3, state(3))
        assert_intact(disk / "run", [1])
        (disk / "filler").unlink()
        assert ckpt(4, state(4))
    assert_intact(disk / "run", [1, 4])


def test_a_disk_that_fills_up_at_every_page_of_a_save(disk, capsys):
    """From no page left to enough for all: in a data file, in each metadata file."""
    failed = 0
    with flaxckpt.CheckpointManager(disk / "run") as ckpt:
        ckpt.save(0, state(0, 8000), wait=True)
        for pages in range(1000):
            fill(disk, pages)
            if not save_fails(ckpt, 1, state(1, 8000)):
                break
            failed += 1
            assert_intact(disk / "run", [0], 8000)
            assert free_pages(disk) == pages
            (disk / "filler").unlink()
    assert_intact(disk / "run", [0, 1], 8000)
    with capsys.disabled():
        print(f"\nfull disk: {failed} saves failed for lack of 1 to {failed} pages")
    assert failed > 16


def test_a_disk_without_inodes(tmp_path, capsys):
    failed = 0
    with disks.tmpfs(tmp_path / "disk", DISK, inodes=64) as disk:
        with flaxckpt.CheckpointManager(disk / "run") as ckpt:
            ckpt.save(0, state(0), wait=True)
            for inodes in range(64):
                fillers = []
                while os.statvfs(disk).f_ffree > inodes:
                    fillers.append(disk / f"filler{len(fillers)}")
                    fillers[-1].touch()
                if not save_fails(ckpt, 1, state(1)):
                    break
                failed += 1
                assert_intact(disk / "run", [0])
                for filler in fillers:
                    filler.unlink()
        assert_intact(disk / "run", [0, 1])
    with capsys.disabled():
        print(f"\nfull disk: {failed} saves failed for lack of inodes")
    assert failed > 5


def test_a_failed_save_deletes_no_other_step(disk):
    with flaxckpt.CheckpointManager(disk / "run", keep=flaxckpt.Keep(last=1)) as ckpt:
        ckpt.save(1, state(1), wait=True)
        fill(disk, 20)
        assert save_fails(ckpt, 2, state(2))
        assert_intact(disk / "run", [1])
        (disk / "filler").unlink()
        ckpt.save(2, state(2), wait=True)
    assert_intact(disk / "run", [2])


def test_replacing_on_a_full_disk_keeps_the_old_one(disk):
    flaxckpt.save(disk / "x", state(1))
    fill(disk, 20)
    with pytest.raises(Exception, match="No space left on device"):
        flaxckpt.save(disk / "x", state(2), overwrite=True)
    assert flaxckpt.restore(disk / "x")["step"] == 1
    assert flaxckpt.verify(disk / "x", strict=True)
    assert sorted(os.listdir(disk)) == ["filler", "x"]
    (disk / "filler").unlink()
    flaxckpt.save(disk / "x", state(2), overwrite=True)
    assert flaxckpt.restore(disk / "x")["step"] == 2


def test_deleting_makes_room_on_a_full_disk(disk):
    with flaxckpt.CheckpointManager(disk / "run") as ckpt:
        for step in range(3):
            ckpt.save(step, state(step))
        ckpt.wait()
        fill(disk, 0)
        ckpt.delete(0)
        ckpt.save(3, state(3), wait=True)
    with contextlib.suppress(FileNotFoundError):
        (disk / "filler").unlink()
    assert_intact(disk / "run", [1, 2, 3])
