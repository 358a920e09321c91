"""One task at a time in the background, with its failure kept until somebody hears of it."""

from __future__ import annotations

import atexit
import functools
import logging
import queue
import threading
import traceback
import weakref
from collections.abc import Callable

from flaxckpt.errors import BackgroundSaveError, SaveTimeoutError

logger = logging.getLogger("flaxckpt")


class _Task:
    """Something to do, called `name` in errors, and whether it is done."""

    def __init__(self, name: str, run: Callable[[], None]):
        """Not done yet."""
        self.name, self.run = name, run
        self.done = threading.Event()


class Background:
    """Runs one task at a time in a thread of its own.

    A script that ends waits for it, however it ends: by its last line, `sys.exit` or an exception.
    """

    def __init__(self, timeout_secs: float) -> None:
        """Nothing runs; what will is waited for so long."""
        self.timeout_secs = timeout_secs
        self._tasks: queue.SimpleQueue[_Task | None] | None = None
        self._task: _Task | None = None
        self._at_exit: Callable[[], None] | None = None
        self._failure: tuple[str, BaseException] | None = None
        self.last_error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a task is running."""
        return self._task is not None and not self._task.done.is_set()

    def start(self, name: str, task: Callable[[], None]) -> None:
        """Runs `task`, called `name` in errors; the one before it has ended and was raised."""
        self._task = _Task(name, functools.partial(self._run, name, task))
        self._at_exit = functools.partial(_finish, self._task, self.timeout_secs)
        atexit.register(self._at_exit)
        self._queue().put(self._task)

    def _queue(self) -> queue.SimpleQueue[_Task | None]:
        """What the thread takes its tasks from; the thread ends when this object is gone.

        It is one thread for all tasks: the C library gives each new one a heap of its own, and
        the chunks of every save would lie in another.
        """
        if self._tasks is None:
            self._tasks = queue.SimpleQueue()
            weakref.finalize(self, self._tasks.put, None)
            # A daemon, because Python would wait for any other thread without a bound; and no
            # pool of Python's, because those take no work once the interpreter is ending.
            serve = functools.partial(_serve, self._tasks)
            threading.Thread(target=serve, name="flaxckpt-save", daemon=True).start()
        return self._tasks

    def _run(self, name: str, task: Callable[[], None]) -> None:
        """Runs `task` and keeps what it raises; nobody is there to catch it."""
        try:
            task()
        except BaseException as error:  # noqa: BLE001 - raised again by `raise_failure`
            # The frames hold the snapshot: every byte of the state, and the disk may be full.
            del task
            _forget_frames(error)
            self.last_error, self._failure = error, (name, error)
            logger.error("%s failed: %s: %s", name, type(error).__name__, error)

    def join(self) -> None:
        """Waits for the running task.

        Raises:
          SaveTimeoutError: when it takes too long.
        """
        if self._task is None:
            return
        if not self._task.done.wait(min(self.timeout_secs, threading.TIMEOUT_MAX)):
            raise SaveTimeoutError(
                f"{self._task.name} did not end within {self.timeout_secs:g} s. It goes on; "
                "wait again, or give Options(timeout_secs=...) more."
            )
        self._task = None
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)

    def raise_failure(self) -> None:
        """Raises the failure of the last task, once.

        Raises:
          BackgroundSaveError: from the original exception.
        """
        if self._failure is None:
            return
        (name, error), self._failure = self._failure, None
        raise BackgroundSaveError(
            f"{name} failed in the background: {type(error).__name__}: {str(error).rstrip('.')}. "
            "The steps before it are intact. Remove the cause, and save again."
        ) from error


def _forget_frames(error: BaseException | None) -> None:
    """Drops what the frames of `error`, and of those it came from, hold; it prints as before."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _serve(tasks: queue.SimpleQueue[_Task | None]) -> None:
    """Runs one task after the other until there is a `None`; keeps nothing of what is done."""
    while (task := tasks.get()) is not None:
        run, done = task.run, task.done
        del task.run, task
        run()
        del run
        done.set()
        del done


def _finish(task: _Task, timeout_secs: float) -> None:
    """Waits for `task` while the interpreter ends, and says so."""
    if task.done.is_set():
        return
    logger.warning("%s: the script ends, waiting for it at most %g s", task.name, timeout_secs)
    if not task.done.wait(min(timeout_secs, threading.TIMEOUT_MAX)):
        logger.error("%s did not end within %g s and is given up", task.name, timeout_secs)
