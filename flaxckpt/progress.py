"""A bar on the terminal for what takes longer than two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

# What is done sooner needs no bar.
AFTER_SECS = 2.0


class Progress:
    """Shows how many bytes of a save or a restore are done; used as a context manager.

    It writes to the standard error, and only where that is a terminal.
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
        """Notes that so many more bytes are done."""
        self._done += nbytes
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done)
        elif self._is_shown and self._clock() - self._begun > AFTER_SECS:
            self._bar = _bar()
            self._bar.add_task(self._title, total=self._total, completed=self._done)
            self._bar.start()

    def counted(self, items: Iterable[T], size: Callable[[T], int]) -> Iterator[T]:
        """`items`, each noted with its `size` in bytes once the next one is asked for."""
        for item in items:
            yield item
            self.advance(size(item))

    def __enter__(self) -> Self:
        """This."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.stop()


def _bar() -> Any:
    """The bar, which leaves nothing behind and lets others print."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Bar(
        *columns,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
