"""Where the processes of a job leave notes for one another: in a service, or in the storage."""

from __future__ import annotations

from typing import Protocol


class SilentBoardError(Exception):
    """The process that keeps the notes does not answer."""


class Board(Protocol):
    """Where processes leave notes. A note is never changed."""

    def post(self, name: str, text: str) -> None:
        """Leaves a note, unless there is one of that name."""

    def read(self, name: str, wait_secs: float) -> str | None:
        """A note, waited for at most so long; `None` when there is none by then."""

    def below(self, name: str) -> dict[str, str]:
        """All notes whose names begin with `name` and a slash, by the rest of their names.

        Raises:
          SilentBoardError: when whoever keeps the notes does not answer.
        """

    def remove(self, name: str) -> None:
        """Removes all notes whose names begin with `name` and a slash."""
