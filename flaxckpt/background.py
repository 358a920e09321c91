"""One task at a time in the background, with its failure kept until somebody hears of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from flaxckpt.errors import BackgroundSaveError, SaveTimeoutError

logger = logging.getLogger("flaxckpt")


class Background:
    """Runs one task at a time in a thread of its own.

    The thread is no daemon, so a script that ends waits for it, however it ends: by its last
    line, `sys.exit` or an exception. (Thread pools refuse work at that point, and daemons die.)
    """

    def __init__(self) -> None:
        """Nothing runs."""
        self._thread: threading.Thread | None = None
        self._failure: tuple[str, BaseException] | None = None
        self.last_error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a task is running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, name: str, task: Callable[[], None]) -> None:
        """Runs `task`, called `name` in errors; the one before it has ended and was raised."""
        self._thread = threading.Thread(target=self._run, args=(name, task), name=name)
        self._thread.start()

    def _run(self, name: str, task: Callable[[], None]) -> None:
        """Runs `task` and keeps what it raises; nobody is there to catch it."""
        try:
            task()
        except BaseException as error:  # noqa: BLE001 - raised again by `raise_failure`
            self.last_error, self._failure = error, (name, error)
            logger.error("%s failed: %s: %s", name, type(error).__name__, error)

    def join(self, timeout_secs: float) -> None:
        """Waits for the running task.

        Raises:
          SaveTimeoutError: when it takes longer.
        """
        if self._thread is None:
            return
        self._thread.join(timeout_secs)
        if self._thread.is_alive():
            raise SaveTimeoutError(
                f"{self._thread.name} did not end within {timeout_secs:g} s. It goes on; wait "
                "again, or give Options(timeout_secs=...) more."
            )
        self._thread = None

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
