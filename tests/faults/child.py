"""The process that is killed, and whose system calls fail: `python -m tests.faults.child`.

It imports everything once and then forks a worker for each worker that was killed, before jax has
a backend or TensorStore a thread; so a new victim costs a fraction of a second. Who reads standard
input, server or worker, takes one line of JSON for an attempt: the directory of a new run, the
step to save, which part of the protocol to break on purpose (`BREAKS`), how a step becomes
visible, and whether each has items. The worker saves steps
0 and 1, which also warms it up, and answers `ready`; at the next line it makes the save that is
traced, of step 2, whose commit makes retention delete step 0, or of step 1 again; and says how
that ended; at the next line likewise step 3, with the same manager. The server answers `exit` for
a dead worker.
"""

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path
from unittest import mock

import jax
import numpy as np

import flaxckpt
import flaxckpt.run.writer
import tests.warm  # noqa: F401 - for all workers once
from flaxckpt.store import local
from flaxckpt.store.local import remove

KEEP = flaxckpt.Keep(last=2)


class Counter:
    """An object that knows its own state."""

    def __init__(self, count=-1):
        self.count = count

    def get_state(self):
        """How far it is."""
        return {"count": self.count}

    def set_state(self, state):
        """Goes on from there."""
        self.count = state["count"]


def items(step):
    """What is saved beside the state: a tree, a JSON file, and the state of an object."""
    ema = {"weights": np.arange(300.0) - step, "bias": np.full(3, step)}
    return {"ema": ema, "config": {"name": f"step {step}"}, "data": Counter(step)}


def state(step):
    """A state that needs every file a checkpoint can have."""
    return {
        "weights": np.arange(3000, dtype=np.float32) + step,  # too big for the B-tree
        "bias": jax.device_put(np.full(3, step, np.float16)),
        "key": jax.random.key(step),
        "text": f"step {step}",
        "list": [step, 2.5, np.ones((2, 2), np.int8), None],
    }


def _copy(old, new, *, rename=os.rename):
    """`os.rename` that gives step 2 its name file by file."""
    if os.path.basename(new) == "2":
        shutil.copytree(old, new)
    else:
        rename(old, new)


def _fsync_and_forget(fd, fsync=os.fsync):
    """`os.fsync` that keeps its failures to itself."""
    with contextlib.suppress(OSError):
        fsync(fd)


def _delete_then_write(job, pieces, collective, *, write=flaxckpt.run.writer.write):
    """`write` that makes room first."""
    final = Path(job.final)
    old = {"1": final, "2": final.with_name("0")}.get(final.name)
    if old is not None and old.exists():
        remove(old, fsync=True)
    write(job, pieces, collective)


BREAKS = {
    "": contextlib.nullcontext,
    "copied, not renamed": lambda: mock.patch("os.rename", _copy),
    "fsync errors are swallowed": lambda: mock.patch("os.fsync", _fsync_and_forget),
    "files are not synced": lambda: mock.patch("os.fsync"),
    "directories are not synced": lambda: mock.patch.object(local, "fsync_directories"),
    "old steps go first": lambda: mock.patch("flaxckpt.run.writer.write", _delete_then_write),
}


def answer(**said):
    """One line for the test."""
    print(json.dumps(said), flush=True)


def save(manager, step, tree, beside, overwrite=False):
    """Saves and says how it ended."""
    try:
        manager.save(step, tree, overwrite=overwrite, items=beside)
    except Exception as error:  # noqa: BLE001 - the test judges it
        answer(error=type(error).__name__, message=str(error))
    else:
        answer(error=None)


def attempt(directory, saved, broken, atomic_rename, has_items):
    """One attempt, as the test asks for it line by line."""

    def beside(step):
        return items(step) if has_items else {}

    with BREAKS[broken]():
        options = flaxckpt.Options(atomic_rename=atomic_rename)
        manager = flaxckpt.CheckpointManager(directory, keep=KEEP, async_=False, options=options)
        for step in (0, 1):
            manager.save(step, state(step), items=beside(step))
        tree, others = state(2), beside(2)
        answer(ready=os.getpid(), threads=[int(name) for name in os.listdir("/proc/self/task")])
        sys.stdin.readline()
        save(manager, saved, tree, others, overwrite=saved == 1)
        sys.stdin.readline()
        save(manager, 3, state(3), beside(3))


def work(line):
    """A worker: attempts until there is no more input, or it is killed."""
    while line:
        attempt(**json.loads(line))
        line = sys.stdin.readline()


def serve():
    """The server: a worker for the next line, whenever there is none."""
    answer(up=True)
    while line := sys.stdin.readline():
        if (pid := os.fork()) == 0:
            try:
                work(line)
                os._exit(0)
            except BaseException as error:  # noqa: BLE001 - it has nowhere else to go
                answer(crash=repr(error))
                os._exit(1)
        answer(exit=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


if __name__ == "__main__":
    serve()
