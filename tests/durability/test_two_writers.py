"""Two processes that save into one run: each step is one of theirs, whole."""

import hashlib

import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from tests.durability.children import child

STEPS = 30

# For each line "step": saves it with the writer's id in every leaf, and says how that went.
WRITER = """
    import sys, numpy as np, flaxckpt
    from flaxckpt import errors
    from tests.durability.test_two_writers import state
    directory, me, async_, overwrite = sys.argv[1], int(sys.argv[2]), *map(eval, sys.argv[3:5])
    ckpt = flaxckpt.CheckpointManager(directory, async_=async_)
    print("open", flush=True)
    for line in sys.stdin:
        how = "saved"
        try:
            ckpt.save(int(line), state(me, int(line)), overwrite=overwrite)
            ckpt.wait()
        except errors.StepExistsError:
            how = "exists"
        except errors.BackgroundSaveError as error:
            assert type(error.__cause__) is errors.StepExistsError, error.__cause__
            how = "exists, told in the background"
        print(how, flush=True)
"""

# Stops itself in the middle of saving step 5, before the n-th call of a function of the library.
ZOMBIE = """
    import signal, sys, threading, flaxckpt
    from flaxckpt import errors
    from flaxckpt.store import local
    from tests.durability.test_two_writers import state
    directory, name, nth, async_ = *sys.argv[1:3], int(sys.argv[3]), eval(sys.argv[4])
    calls, function = 0, getattr(local, name)
    def stopping(*args, **kwargs):
        global calls
        calls += 1
        if calls == nth:
            # Sent to this thread: sent to the process, another thread might get it, later.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return function(*args, **kwargs)
    ckpt = flaxckpt.CheckpointManager(directory, async_=async_)
    setattr(local, name, stopping)
    print("open", flush=True)
    try:
        ckpt.save(5, state(1, 5))
        ckpt.wait()
    except errors.StepExistsError:
        print("exists", flush=True)
    except errors.BackgroundSaveError as error:
        assert type(error.__cause__) is errors.StepExistsError, error.__cause__
        print("exists", flush=True)
    else:
        print("saved", flush=True)
"""


def state(writer, step):
    """What a writer saves; the small leaves are inlined, the large ones lie in data files."""
    large = {f"w{i}": np.full(50_000 + 1000 * writer, writer) for i in range(4)}
    return large | {"b": np.full(3, writer), "n": writer, "text": str(writer), "step": step}


def owner(run, step):
    """Whose the step is; fails when it is a mixture."""
    flaxckpt.verify(run / str(step), strict=True)
    restored = flaxckpt.restore(run / str(step))
    wanted = state(restored["n"], step)
    assert restored.keys() == wanted.keys()
    assert all(np.array_equal(restored[name], wanted[name]) for name in wanted)
    return restored["n"]


def contents(directory):
    """The files below a directory, by their bytes."""
    return {
        str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in directory.rglob("*")
        if file.is_file()
    }


def both_save(run, steps, async_, overwrite):
    """Two writers save each step at the same time; what each said, by step."""
    with child(WRITER, run, 1, async_, overwrite) as one:
        with child(WRITER, run, 2, async_, overwrite) as two:
            for step in steps:
                first, second = (one, two) if step % 2 else (two, one)
                first.tell(step)
                second.tell(step)
                yield step, {1: one.hear(), 2: two.hear()}
            assert one.end() == two.end() == []


@pytest.mark.parametrize("async_", [False, True], ids=["sync", "async"])
def test_one_wins_each_step_whole(async_, tmp_path, capsys):
    wins, in_commit = {1: 0, 2: 0}, 0
    for step, said in both_save(tmp_path / "run", range(STEPS), async_, overwrite=False):
        (winner,) = (writer for writer, how in said.items() if how == "saved")
        loser = said[3 - winner]
        assert loser.startswith("exists")
        assert owner(tmp_path / "run", step) == winner
        wins[winner] += 1
        in_commit += loser != "exists"
    reader = flaxckpt.CheckpointManager(tmp_path / "run", read_only=True)
    assert reader.steps() == list(range(STEPS))
    assert len(list((tmp_path / "run").iterdir())) == STEPS
    with capsys.disabled():
        told = f", {in_commit} losers told in the background" if async_ else ""
        print(f"\ntwo writers: {wins[1]} and {wins[2]} of {STEPS} steps won{told}")
    # Some races must have got as far as the commit, or nothing was tested.
    assert in_commit > 0 or not async_


def test_of_two_that_replace_a_step_the_last_wins_whole(tmp_path):
    run = tmp_path / "run"
    owners = []
    for step, said in both_save(run, range(STEPS), async_=True, overwrite=True):
        assert said == {1: "saved", 2: "saved"}
        owners.append(owner(run, step))
    assert len(list(run.iterdir())) == STEPS
    assert set(owners) <= {1, 2}


def zombies():
    """Where the zombie stops: before it writes each file, and before the rename."""
    places = [("write_file", n) for n in (1, 2)]
    return [*places, ("fsync_directories", 1), ("_make_visible", 1)]


@pytest.mark.parametrize("async_", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("place", zombies(), ids=lambda p: f"{p[0]}-{p[1]}")
def test_a_zombie_changes_nothing(place, async_, tmp_path):
    run = tmp_path / "run"
    with child(ZOMBIE, run, *place, async_) as zombie:
        zombie.until_stopped()
        with flaxckpt.CheckpointManager(run) as ckpt:
            assert ckpt.steps() == []
            ckpt.save(5, state(2, 5), wait=True)
            before = contents(run / "5")
            zombie.resume()
            assert zombie.end() == ["exists"]
            assert owner(run, 5) == 2
            assert contents(run / "5") == before
            assert [path.name for path in run.iterdir()] == ["5"]
            with pytest.raises(errors.StepExistsError):
                ckpt.save(5, state(3, 5))


def test_the_zombie_would_save_if_nobody_else_did(tmp_path):
    with child(ZOMBIE, tmp_path / "run", "_make_visible", 1, True) as zombie:
        zombie.until_stopped()
        zombie.resume()
        assert zombie.end() == ["saved"]
    assert owner(tmp_path / "run", 5) == 1
