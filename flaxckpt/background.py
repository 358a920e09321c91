"""One task at a time in the background, with its failure kept until somebody hears of it."""

from __future__ import annotations

import atexit
import functools
import logging
import threading
import traceback
from collections.abc import Callable

from flaxckpt.errors import BackgroundSaveError, SaveTimeoutError

logger = logging.getLogger("flaxckpt")


class Background:
    """Runs one task at a time in a thread of its own.

    A script that ends waits for it, however it ends: by its last line, `sys.exit` or an exception.
    """

    def __init__(self, timeout_secs: float) -> None:
        """Nothing runs; what will is waited for so long."""
        self._timeout_secs = timeout_secs
        self._thread: threading.Thread | None = None
        self._at_exit: Callable[[], None] | None = None
        self._failure: tuple[str, BaseException] | None = None
        self.last_error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a task is running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, name: str, task: Callable[[], None]) -> None:
        """Runs `task`, called `name` in errors; the one before it has ended and was raised."""
        # A daemon, because Python would wait for any other thread without a bound; and a thread
        # of its own, because Python's pools take no work once the interpreter is ending.
        thread = threading.Thread(target=self._run, args=(name, task), name=name, daemon=True)
        self._thread = thread
        self._at_exit = functools.partial(_finish, thread, self._timeout_secs)
        atexit.register(self._at_exit)
        thread.start()

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
        if self._thread is None:
            return
        self._thread.join(min(self._timeout_secs, threading.TIMEOUT_MAX))
        if self._thread.is_alive():
            raise SaveTimeoutError(
                f"{self._thread.name} did not end within {self._timeout_secs:g} s. It goes on; "
                "wait again, or give Options(timeout_secs=...) more."
            )
        self._thread = None
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
            f"{name} failed in the background: {type(error).__name__}: {error}. "
            "The steps before it are intact."
        ) from error


def _forget_frames(error: BaseException | None) -> None:
    """Drops what the frames of `error`, and of those it came from, hold; it prints as before."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _finish(thread: threading.Thread, timeout_secs: float) -> None:
    """Waits for `thread` while the interpreter ends, and says so."""
    if not thread.is_alive():
        return
    logger.warning("%s: the script ends, waiting for it at most %g s", thread.name, timeout_secs)
    thread.join(min(timeout_secs, threading.TIMEOUT_MAX))
    if thread.is_alive():
        logger.error("%s did not end within %g s and is given up", thread.name, timeout_secs)
