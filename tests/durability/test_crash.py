"""Processes that end: by themselves, by an error, and by SIGKILL."""

import random
import signal
import time

import numpy as np
import pytest

import flaxckpt
from tests.processes import run, start

ENDINGS = {
    "its last line": ("", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "an exception": ("raise RuntimeError('the loop failed')", 1),
    "an interrupt": ("raise KeyboardInterrupt", -signal.SIGINT),
}

SAVE_AND_END = """
    import sys, numpy as np, flaxckpt
    ckpt = flaxckpt.CheckpointManager(sys.argv[1])
    ckpt.save(5, {{"w": np.arange(20_000_000)}})
    assert ckpt.latest_step() is None, "the save was not in flight any more"
    {ending}
"""

LOOP = """
    import sys, numpy as np, flaxckpt
    keep = flaxckpt.Keep(last=2)
    with flaxckpt.CheckpointManager(sys.argv[1], keep=keep) as ckpt:
        print("open", ckpt.next_step, flush=True)
        for step in range(ckpt.next_step, 100_000):
            ckpt(step, {str(i): np.full(50_000, step + i) for i in range(8)})
"""


@pytest.mark.parametrize("how", ENDINGS)
def test_a_script_that_ends_waits_for_its_save(how, tmp_path):
    ending, expected = ENDINGS[how]
    code, _, err = run(SAVE_AND_END.format(ending=ending), tmp_path / "run")
    assert code == expected, err
    reader = flaxckpt.CheckpointManager(tmp_path / "run", read_only=True)
    assert reader.steps() == [5]
    assert (reader.restore()["w"] == np.arange(20_000_000)).all()


def test_the_wait_at_the_end_has_a_bound(tmp_path):
    """The save cannot get on: somebody holds the lock of the run."""
    code = """
        import fcntl, os, sys, numpy as np, flaxckpt
        options = flaxckpt.Options(timeout_secs=0.5)
        ckpt = flaxckpt.CheckpointManager(sys.argv[1], options=options)
        fcntl.flock(os.open(ckpt.directory, os.O_RDONLY), fcntl.LOCK_EX)
        ckpt.save(5, {"w": np.arange(10)})
    """
    status, _, err = run(code, tmp_path / "run", timeout=60)
    assert status == 0
    waiting, given_up = err.splitlines()[-2:]
    assert waiting.endswith("the script is exiting, waiting up to 0.5 s for it to finish")
    assert given_up.endswith("did not finish within 0.5 s and is given up")
    assert flaxckpt.CheckpointManager(tmp_path / "run").steps() == []


def test_a_save_that_fails_while_the_script_ends_is_told(tmp_path):
    code = """
        import shutil, sys, numpy as np, flaxckpt
        ckpt = flaxckpt.CheckpointManager(sys.argv[1])
        shutil.rmtree(sys.argv[1])
        ckpt.save(5, {"w": np.arange(10)})
    """
    _, _, err = run(code, tmp_path / "run")
    assert "saving step 5" in err
    assert "FileNotFoundError" in err


def test_kill_9_at_any_time_leaves_the_newest_step_whole(tmp_path):
    rng = random.Random(0)
    newest = -1
    for _ in range(6):
        process = start(LOOP, tmp_path / "run")
        opened = process.stdout.readline()
        time.sleep(rng.uniform(0.0, 0.4))
        process.kill()
        process.communicate()
        assert opened == f"open {newest + 1}\n"
        reader = flaxckpt.CheckpointManager(tmp_path / "run", read_only=True)
        steps = reader.steps()
        for step in steps:
            assert flaxckpt.verify(tmp_path / "run" / str(step)).problems == ()
            state = reader.restore(step=step)
            assert all((state[str(i)] == step + i).all() for i in range(8))
        newest = max([newest, *steps])
        assert (reader.latest_step() if steps else -1) == newest
    assert newest > 0


def test_what_a_dead_writer_left_is_removed_by_the_next(tmp_path):
    code = """
        import os, signal, sys, numpy as np, flaxckpt
        from flaxckpt.store import local
        def die(path, data, *, fsync):
            os.kill(os.getpid(), signal.SIGKILL)
        local.write_file = die
        flaxckpt.save(sys.argv[1] + "/7", {"w": np.arange(10)})
    """
    code, _, err = run(code, tmp_path / "run")
    assert code == -signal.SIGKILL, err
    (left,) = (tmp_path / "run").iterdir()
    assert ".flaxckpt-tmp-" in left.name
    assert flaxckpt.CheckpointManager(tmp_path / "run", read_only=True).steps() == []
    assert left.exists()
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        assert ckpt.steps() == []
    assert not left.exists()
