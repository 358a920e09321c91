"""Power cuts: what `wait` has returned for is on the disk, whatever the kernel still had in memory.

A loop image is copied while it is mounted: the copy holds every block written so far, and none
after. Mounted, its file system replays its journal as after a power cut. Beside the saves another
process fsyncs files of its own, which makes file systems persist new names before the bytes.
"""

import contextlib
import random
import time

import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from tests.durability import disks
from tests.durability.children import child

CUTS, KEPT = 6, 3

# Saves the step that is asked for, and says so once `wait` has returned; then does nothing. The
# reply comes before the save when the power is to be cut in the middle of it.
SAVER = """
    import sys, numpy as np, flaxckpt
    directory, fsync, kept = sys.argv[1], sys.argv[2] == "True", int(sys.argv[3])
    options = flaxckpt.Options(fsync=fsync, chunk_bytes=300_000)
    keep = flaxckpt.Keep(last=kept)
    ckpt = flaxckpt.CheckpointManager(directory + "/deep/run", keep=keep, options=options)
    print("open", flush=True)
    for line in sys.stdin:
        step, value = map(int, line.split())
        state = {f"w{i}": np.arange(100_000) + value + i for i in range(3)}
        state |= {"b": np.full(5, value), "n": value, "text": np.array(["a", str(value)])}
        ckpt.save(step, state, overwrite=True)
        print("begun", flush=True)
        ckpt.wait()
        print("saved", flush=True)
"""

LOGGER = """
    import os, sys
    print("open", flush=True)
    while True:
        with open(sys.argv[1] + "/log", "ab") as file:
            file.write(bytes(100))
            file.flush()
            os.fsync(file.fileno())
"""


def expected(value):
    state = {f"w{i}": np.arange(100_000) + value + i for i in range(3)}
    return state | {"b": np.full(5, value), "n": value, "text": np.array(["a", str(value)])}


def kept(newest):
    """The steps to keep when the steps 0 to `newest` were saved."""
    return set(range(newest + 1)[-KEPT:])


class Machine:
    """A disk with a process that saves and one that logs; its power can be cut."""

    def __init__(self, kind, tmp_path, *, fsync):
        self.kind, self.tmp_path = kind, tmp_path
        self.image = tmp_path / "image"
        self.fsync = fsync
        self.rng = random.Random(0)
        self.cuts = 0

    @contextlib.contextmanager
    def running(self):
        with disks.image(self.image, self.kind, self.tmp_path / "disk") as disk:
            with (
                child(SAVER, disk, self.fsync, KEPT) as self.saver,
                child(LOGGER, disk) as self.logger,
            ):
                yield self

    def save(self, step, value):
        """Asks for a save and returns when it has begun."""
        self.saver.tell(f"{step} {value}")
        assert self.saver.hear() == "begun"

    def wait(self):
        """Returns when `wait` has."""
        assert self.saver.hear() == "saved"

    def cut(self):
        """Cuts the power now; returns what is wrong with each step, of those that are listed."""
        self.cuts += 1
        self.logger.pause()
        self.saver.pause()
        copy = self.tmp_path / f"copy{self.cuts}"
        disks.cut_power(self.image, copy)
        self.saver.resume()
        self.logger.resume()
        with disks.after_power_cut(copy, self.kind, self.tmp_path / f"after{self.cuts}") as disk:
            reader = flaxckpt.CheckpointManager(disk / "deep" / "run", read_only=True)
            return {step: read(reader, step) for step in reader.steps()}


def read(reader, step):
    """The value that the state of a step was made from; a message when it is not whole."""
    try:
        flaxckpt.verify(reader.directory / str(step), strict=True)
        state = reader.restore(step=step)
    except (errors.FlaxckptError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    wanted = expected(state["n"])
    same = all(np.array_equal(state[name], wanted[name]) for name in wanted)
    return state["n"] if same and state.keys() == wanted.keys() else "it is another state"


@pytest.fixture
def machine(request, tmp_path):
    kind, fsync = request.param
    with Machine(kind, tmp_path, fsync=fsync).running() as running:
        yield running


def on(fsync):
    """The test is run on each file system."""
    kinds = [pytest.param((kind, fsync), id=kind) for kind in disks.MKFS]
    return pytest.mark.parametrize("machine", kinds, indirect=True)


@on(fsync=True)
def test_what_wait_returned_for_survives_a_power_cut(machine, capsys):
    for step in range(CUTS):
        if alone := step % 2 == 0:  # nothing else makes the file system write its journal
            machine.logger.pause()
        machine.save(step, value=step)
        machine.wait()
        if not alone:
            time.sleep(machine.rng.choice([0, 0.02]))  # with and without others' fsyncs after it
        found = machine.cut()
        # Steps that are kept are there, and what else is listed is whole too.
        assert found == {s: s for s in found}
        assert kept(step) <= found.keys()
    with capsys.disabled():
        print(f"\n{machine.kind}: {machine.cuts} power cuts after wait(), all steps whole")


@on(fsync=True)
def test_a_step_that_was_replaced_survives_a_power_cut(machine):
    machine.save(7, value=0)
    machine.wait()
    for value in range(1, CUTS):
        machine.save(7, value)
        machine.wait()
        assert machine.cut() == {7: value}


@on(fsync=True)
def test_a_power_cut_in_the_middle_of_a_save(machine, capsys):
    machine.save(0, value=0)
    machine.wait()
    began = time.monotonic()
    machine.save(1, value=1)
    machine.wait()
    length = time.monotonic() - began
    visible = 0
    for step in range(2, 2 + 2 * CUTS):
        machine.save(step, value=step)
        time.sleep(machine.rng.uniform(0, length))
        found = machine.cut()
        machine.wait()
        assert found == {s: s for s in found}
        assert step - 1 in found
        visible += step in found
    with capsys.disabled():
        print(f"\n{machine.kind}: {2 * CUTS} power cuts in a save, {visible} of them after commit")


@on(fsync=False)
def test_without_fsync_steps_are_lost(machine, capsys):
    """The control: a power cut does lose what was not fsynced, so the tests above can fail."""
    lost = 0
    for step in range(CUTS):
        machine.save(step, value=step)
        machine.wait()
        found = machine.cut()
        lost += any(found.get(s) != s for s in kept(step))
    with capsys.disabled():
        print(f"\n{machine.kind}: without fsync {lost} of {machine.cuts} power cuts lost a step")
    assert lost > 0
