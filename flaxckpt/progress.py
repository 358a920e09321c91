"""A progress bar on the terminal for operations that take more than two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

# A faster operation shows no bar.
AFTER_SECS = 2.0


class Progress:
    """Shows the progress of a save or a restore in bytes; a context manager.

    It writes to stderr, and only if that is a terminal.
    """

    def __init__(
        self,
        title: str,
        total: int | None,
        *,
        is_shown: bool,
        clock: Callable[[], float] = time.monotonic,
    ):
        """A bar called `title` for `total` bytes, if known, or none unless `is_shown`."""
        self._title, self._total, self._clock = title, total, clock
        self._is_shown = is_shown and sys.stderr.isatty()
        self._done, self._begun = 0, clock()
        self._bar: Any = None

    def advance(self, nbytes: int) -> None:
        """Records that `nbytes` more are done."""
        self._done += nbytes
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done)
        elif self._is_shown and self._clock() - self._begun > AFTER_SECS:
            self._bar = progress_bar()
            self._bar.add_task(self._title, total=self._total, completed=self._done)
            self._bar.start()

    def counted(self, items: Iterable[T], size: Callable[[T], int]) -> Iterator[T]:
        """Yields `items`; records the `size` of each in bytes once the next is asked for."""
        for item in items:
            yield item
            self.advance(size(item))

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.stop()


def progress_bar() -> Any:
    """A rich bar of bytes, speed and remaining time, which disappears at the end."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bar

    text = TextColumn("{task.description}", markup=False)
    return Bar(
        *(text, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
