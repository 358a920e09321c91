"""Many saves with retention and kills: nothing is lost, nothing leaks, no rubbish stays."""

import os
import random
import time

import numpy as np

import flaxckpt
from tests.durability.children import child

SAVES = int(os.environ.get("FLAXCKPT_SOAK_SAVES", "1200"))
KILLS = 12
LAST, BEST = 3, 2

# Waits for "go", goes on after the newest step, and prints each step once it is committed, with
# the memory (in kB) and the open files of the process.
LOOP = """
    import os, sys, numpy as np, flaxckpt
    from tests.durability.test_soak import KEEP, loss, state
    print("open", flush=True)
    sys.stdin.readline()
    page = os.sysconf("SC_PAGESIZE") // 1024
    with flaxckpt.CheckpointManager(sys.argv[1], keep=KEEP) as ckpt:
        if (newest := ckpt.latest_step()) is not None:
            restored = ckpt.restore()
            assert all(np.array_equal(restored[k], v) for k, v in state(newest).items()), restored
        for step in range(ckpt.next_step, int(sys.argv[2])):
            ckpt.save(step, state(step), metrics={"loss": loss(step)})
            ckpt.wait()
            memory = int(open("/proc/self/statm").read().split()[1]) * page
            print(step, memory, len(os.listdir("/proc/self/fd")), flush=True)
"""
KEEP = flaxckpt.Keep(last=LAST, best=BEST, mode="min")


def state(step):
    return {"w": np.arange(200) * step, "b": np.full(3, 0.5 * step), "step": step}


def loss(step):
    return random.Random(step).random()


def kept(newest):
    """The steps to keep of 0 to `newest`."""
    steps = range(newest + 1)
    best = sorted(steps, key=lambda step: (loss(step), -step))[:BEST]
    return {*steps[-LAST:], *best}


def assert_whole(run, newest):
    """Every step to keep is there, and every step that is there is whole."""
    reader = flaxckpt.CheckpointManager(run, read_only=True)
    steps = reader.steps()
    assert (steps[-1] if steps else -1) == newest
    missing = kept(newest) - set(steps)
    assert missing == set()
    for step in steps:
        restored = reader.restore(step=step)
        assert all(np.array_equal(restored[k], v) for k, v in state(step).items()), step


def newest_of(run, reported):
    """The newest step; one more than the last reported one may have been committed."""
    steps = flaxckpt.CheckpointManager(run, read_only=True).steps()
    newest = steps[-1] if steps else -1
    assert newest in (reported, reported + 1), f"{reported} was reported, {newest} is there"
    return newest


def test_saves_and_kills(tmp_path, capsys):
    run, saves = tmp_path / "run", SAVES // 2
    rng, newest, began, kills = random.Random(0), -1, time.monotonic(), 0
    while newest < saves - 1:
        with child(LOOP, run, saves) as process:
            process.tell("go")
            reported = newest
            goal = newest + max(1, int(rng.uniform(0.3, 1.3) * saves / KILLS))
            while reported < min(goal, saves - 1):
                reported = int(process.hear().split()[0])
            time.sleep(rng.uniform(0, 0.02))
            rest = process.kill()
        # The last line may have been cut off.
        kills += 1
        whole = [int(line.split()[0]) for line in rest if len(line.split()) == 3]
        newest = newest_of(run, max([reported, *whole]))
        assert_whole(run, newest)
    with flaxckpt.CheckpointManager(run, keep=KEEP) as ckpt:
        # The last kill may have come before what is no longer kept was deleted.
        ckpt.save(saves, state(saves), metrics={"loss": loss(saves)})
    assert_whole(run, saves)
    assert {path.name for path in run.iterdir()} == {str(step) for step in kept(saves)}
    with capsys.disabled():
        print(f"\nsoak: {saves} saves, {kills} kills, {time.monotonic() - began:.0f} s")


def flat(values, tolerance):
    """Whether the last quarter of `values` is no more than the second one, and a bit."""
    quarter = len(values) // 4
    second, last = values[quarter : 2 * quarter], values[-quarter:]
    return np.median(last) <= np.median(second) + tolerance


def test_memory_and_open_files_stay_flat(tmp_path, capsys):
    run, saves, began = tmp_path / "run", SAVES // 2, time.monotonic()
    with child(LOOP, run, saves) as process:
        process.tell("go")
        lines = process.end()
    steps, memory, files = np.array([line.split() for line in lines], int).T
    assert steps.tolist() == list(range(saves))
    assert_whole(run, saves - 1)
    assert {path.name for path in run.iterdir()} == {str(step) for step in kept(saves - 1)}
    quarter = saves // 4
    with capsys.disabled():
        print(
            f"\nsoak: {saves} saves in one process, {time.monotonic() - began:.0f} s; memory "
            f"{np.median(memory[quarter : 2 * quarter]) / 1024:.1f} MiB in the second quarter, "
            f"{np.median(memory[-quarter:]) / 1024:.1f} in the last; {files[0]} to {files[-1]} "
            "open files"
        )
    # A leak of 5 kB a save would be 2.5 MB.
    assert flat(memory, tolerance=2048)
    assert flat(files, tolerance=0)


def test_the_leak_detector_can_find_one():
    assert flat([100_000 + n % 7 for n in range(1000)], tolerance=2048)
    assert not flat([100_000 + 5 * n for n in range(1000)], tolerance=2048)
    assert not flat(list(range(1000)), tolerance=0)
