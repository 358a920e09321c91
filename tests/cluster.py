"""A function in several processes that form one `jax.distributed` cluster, on this host.

    def body(context, directory):  # at the top level of a module of the tests
        ...
        return what_the_test_looks_at  # anything that can be pickled

    results = cluster.run(body, 2, tmp_path, local_devices=4)

The workers are forked from a server that has imported jax but has no backend yet, so one costs a
fraction of a second. A worker that has reported stays until all have, and process 0, whose end
would abort the others, goes last. Nothing is shut down: a worker that failed cannot hang there.
"""

import contextlib
import dataclasses
import multiprocessing.connection
import multiprocessing.context
import os
import pickle
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

from tests.cluster_preload import Job, mark_file, marks_of, work
from tests.processes import environment

LOG_TAIL = 3000
LEAVING_SECS = 10


class WorkerFailure(AssertionError):
    """At least one worker failed; the message has the traceback and the log of each."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a process.

    Attributes:
      index: which process.
      returncode: 0, 1 after an exception, or minus the signal that ended it.
      value: what the body returned.
      error: the traceback of its exception.
      log: what the process wrote to stdout and stderr.
      seconds: how long it took, from the start of the run.
      killed: whether `run` killed it, because of `timeout` or `grace`.
      marks: when it was at each of its marks, in seconds from the start of the run.
    """

    index: int
    returncode: int
    value: Any
    error: str | None
    log: str
    seconds: float
    killed: bool
    marks: dict[str, float]

    def __str__(self) -> str:
        killed = ", killed for taking too long" if self.killed else ""
        title = f"--- process {self.index}: exit code {self.returncode}{killed}"
        return "\n".join([title, self.error or "(no exception)", self.log[-LOG_TAIL:]])


def run(
    body: Callable[..., Any],
    count: int,
    *args: object,
    local_devices: int = 1,
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
    grace: float = 5,
    heartbeat_timeout: int = 60,
    check: bool = True,
    during: Callable[[list[int], Path], object] | None = None,
) -> list[Result]:
    """Runs `body(context, *args)` in `count` processes.

    Args:
      body: a function at the top level of a module that a worker can import.
      count: how many processes.
      *args: what else to pass to it.
      local_devices: how many devices each process has.
      env: set in the workers; only for what is read late, like `AWS_*`: jax is imported already.
      timeout: after so many seconds the workers that have not reported are killed.
      grace: likewise, after the first failure.
      heartbeat_timeout: after so many seconds of silence a process is dead for the others.
      check: whether a worker that failed is an error.
      during: called when all have started, with their process ids and `Context.dir`.

    Raises:
      WorkerFailure: if `check` and a worker failed.
    """
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cluster-")))
        port = stack.enter_context(_reserved_port())
        job = Job(count, directory, port, local_devices, dict(env or {}), heartbeat_timeout)
        call = pickle.dumps((body, args))
        workers = [stack.enter_context(_Worker(job, call, index)) for index in range(count)]
        if during is not None:
            during([worker.process.pid for worker in workers], directory)
        _wait(workers, timeout, grace)
        results = [worker.result() for worker in workers]
    if check and any(result.returncode for result in results):
        raise WorkerFailure("\n".join(map(str, results)))
    return results


def wait_for_mark(directory: Path, index: int, name: str, timeout: float = 60) -> None:
    """Waits until process `index` is at its mark `name`; `directory` is the one of the run."""
    deadline = time.monotonic() + timeout
    while not mark_file(directory, index, name).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {index} was not at {name!r} after {timeout} s")
        time.sleep(0.005)


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A port that nobody else is given during the block; gRPC shares it, by SO_REUSEPORT."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


def _server() -> multiprocessing.context.ForkServerContext:
    """The server that forks the workers; this starts it if there is none yet."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.cluster_preload"])
    with mock.patch.dict(os.environ, environment()):
        forkserver.ensure_running()
    return context


class _Worker:
    """A worker, as the test sees it. It is killed at the end of the block."""

    def __init__(self, job: Job, call: bytes, index: int) -> None:
        self._job, self._index = job, index
        self._started = time.time()
        self._seconds: float | None = None
        self._report: tuple[Any, str | None] | None = None
        self._told = self._killed = False
        self._pipe, theirs = multiprocessing.Pipe()
        arguments = (job, call, index, theirs)
        self.process = _server().Process(target=work, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self.process.exitcode is not None

    @property
    def done(self) -> bool:
        """Whether there is nothing to wait for: it has reported, or never will."""
        return self._report is not None or self.ended

    @property
    def failed(self) -> bool:
        """Whether it is known to have failed."""
        raised = self._report is not None and self._report[1] is not None
        return raised or bool(self.process.exitcode)

    @property
    def sources(self) -> list[Any]:
        """What to wait for: its end, and before that its report."""
        if self.ended:
            return []
        return [self.process.sentinel] if self.done else [self.process.sentinel, self._pipe]

    def listen(self) -> None:
        """Takes its report, if there is one."""
        with contextlib.suppress(EOFError, OSError):
            if self._report is None and self._pipe.poll():
                self._report = self._pipe.recv()
        if self._seconds is None and self.done:
            self._seconds = time.time() - self._started

    def let_go(self) -> None:
        """Tells it to end, once."""
        if not self._told:
            self._told = True
            with contextlib.suppress(OSError):
                self._pipe.send(int(self.failed))

    def kill(self) -> None:
        """Kills it for taking too long."""
        self._killed = True
        self.process.kill()

    def result(self) -> Result:
        """What became of it; it has ended."""
        self.listen()
        value, error = self._report or (None, None)
        log = self._job.log(self._index)
        text = log.read_text(errors="replace") if log.exists() else ""
        marks = {name: at - self._started for name, at in marks_of(self._job.dir, self._index)}
        end = self.process.exitcode, value, error, text, self._seconds, self._killed, marks
        return Result(self._index, *end)


def _wait(workers: list[_Worker], timeout: float, grace: float) -> None:
    """Waits until all have ended; kills those that are overdue."""
    deadline = time.monotonic() + timeout
    failed = False
    while not all(worker.ended for worker in workers):
        sources = [source for worker in workers for source in worker.sources]
        multiprocessing.connection.wait(sources, 0.1)
        for worker in workers:
            worker.listen()
        if not failed and any(worker.failed for worker in workers):
            failed = True
            deadline = min(deadline, time.monotonic() + grace)
        _kill_overdue(workers, time.monotonic() - deadline)
        _let_go(workers)


def _kill_overdue(workers: list[_Worker], late: float) -> None:
    """Kills who has not reported `late` seconds ago, in the end also who does not leave."""
    for worker in workers:
        if late > (LEAVING_SECS if worker.done else 0) and not worker.ended:
            worker.kill()


def _let_go(workers: list[_Worker]) -> None:
    """When all are done, lets them end: process 0 after the others."""
    if all(worker.done for worker in workers):
        for worker in workers[1:]:
            worker.let_go()
        if all(worker.ended for worker in workers[1:]):
            workers[0].let_go()
