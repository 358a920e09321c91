"""The workers of `tests.cluster`: what is imported once, before they are forked, and what they do.

No import here may start a backend of jax, or a thread: neither survives a fork.
"""

import contextlib
import dataclasses
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import pytest  # noqa: F401 - the modules of the bodies import it, and what follows

import tests.stores
import tests.warm  # noqa: F401

START_SECS = 60


@dataclasses.dataclass(frozen=True)
class Context:
    """What a body knows of the cluster.

    Attributes:
      index: which process this is.
      count: how many there are.
      dir: a directory of this run that all of them see; it is removed at the end.
    """

    index: int
    count: int
    dir: Path

    def mark(self, name: str) -> None:
        """Notes that this process is at `name`, for `wait_for_mark` and `Result.marks`."""
        new = self.dir / f"new.{self.index}"
        new.write_text(str(time.time()))
        new.rename(mark_file(self.dir, self.index, name))

    def die(self, how: int = signal.SIGKILL) -> None:
        """Ends this process by a signal."""
        os.kill(os.getpid(), how)
        time.sleep(60)


@dataclasses.dataclass(frozen=True)
class Job:
    """What all workers of a run are told."""

    count: int
    dir: Path
    port: int
    local_devices: int
    env: dict[str, str]
    heartbeat_timeout: int

    def log(self, index: int) -> Path:
        """The file for what a process writes to stdout and stderr."""
        return self.dir / f"log.{index}"


def mark_file(directory: Path, index: int, name: str) -> Path:
    """The file that says that, and when, process `index` was at its mark `name`."""
    return directory / f"mark.{index}.{name}"


def marks_of(directory: Path, index: int) -> list[tuple[str, float]]:
    """The marks of process `index`, and when it was there."""
    prefix = mark_file(directory, index, "").name
    files = sorted(directory.glob(f"{prefix}*"), key=lambda file: file.stat().st_mtime_ns)
    return [(file.name.removeprefix(prefix), float(file.read_text())) for file in files]


def work(job: Job, call: bytes, index: int, pipe: Connection) -> None:
    """The life of a worker: it runs the pickled `call`, reports, and stays until it may go."""
    _write_to(job.log(index))
    leaving = threading.Thread(target=_leave, args=(pipe,))
    leaving.start()
    pipe.send(_report(job, call, index))
    leaving.join()


def _write_to(log: Path) -> None:
    """Sends stdout and stderr to a file, also what C++ writes."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _leave(pipe: Connection) -> None:
    """Ends the process when it is told to, or when the test is gone. Nothing is shut down."""
    code = 1
    with contextlib.suppress(EOFError, OSError):
        code = pipe.recv()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _report(job: Job, call: bytes, index: int) -> tuple[Any, str | None]:
    """What the body returned, or the traceback of its exception."""
    try:
        _join(job, index)
        body, args = pickle.loads(call)
        value = body(Context(index, job.count, job.dir), *args)
        pickle.dumps(value)
    except BaseException:  # noqa: BLE001 - the test judges it
        return None, traceback.format_exc()
    return value, None


def _join(job: Job, index: int) -> None:
    """Makes this process a member of the cluster, with devices."""
    os.environ.update(job.env)
    jax.config.update("jax_num_cpu_devices", job.local_devices)  # it wins over XLA_FLAGS
    if index:
        _wait_for_listener(job.port)
    jax.distributed.initialize(
        f"127.0.0.1:{job.port}",
        job.count,
        index,
        cluster_detection_method="deactivate",
        coordinator_bind_address=f"127.0.0.1:{job.port}",
        heartbeat_timeout_seconds=job.heartbeat_timeout,
        initialization_timeout=START_SECS,
    )
    jax.devices()


def _wait_for_listener(port: int) -> None:
    """Waits for process 0: a client that calls too early calls again only after a second."""
    deadline = time.monotonic() + START_SECS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.005)
