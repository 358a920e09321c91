"""The pieces of a state that does not fit in memory twice, handed from one thread to another."""

from __future__ import annotations

import collections
import threading
from collections.abc import Iterable, Iterator

from flaxckpt.saving.snapshot import Piece


class Feed:
    """Hands pieces from the train loop's thread to the writer's, so many bytes at a time.

    The loop's thread calls `put_all` and then `end`; the writer's iterates, and calls `stop` when
    it takes no more.
    """

    def __init__(self, limit: int):
        """At most `limit` bytes, or one piece, wait."""
        self._limit = limit
        self._waiting: collections.deque[Piece] = collections.deque()
        self._bytes = 0
        self._ended = self._stopped = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def put_all(self, pieces: Iterable[Piece]) -> bool:
        """Hands over `pieces`; returns whether the writer took all but what waits."""
        try:
            return all(map(self._put, pieces))
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Says that there are no more pieces, because of `error`."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _put(self, piece: Piece) -> bool:
        """Hands over one piece once there is room; returns whether the writer goes on."""
        size = piece.values.nbytes

        def is_room() -> bool:
            return self._stopped or not self._waiting or self._bytes + size <= self._limit

        with self._changed:
            self._changed.wait_for(is_room)
            if self._stopped:
                return False
            self._waiting.append(piece)
            self._bytes += size
            self._changed.notify_all()
            return True

    def end(self) -> None:
        """Says that there are no more pieces."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Says that no more pieces are taken."""
        with self._changed:
            self._stopped = True
            self._waiting.clear()
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Piece]:
        """The pieces, until the end.

        Raises:
          RuntimeError: when the loop's thread failed to hand over the rest.
        """
        while (piece := self._take()) is not None:
            yield piece

    def _take(self) -> Piece | None:
        """The next piece; `None` after the last."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended or self._error)
            if self._error is not None:
                raise RuntimeError("the state could not be read to its end") from self._error
            if not self._waiting:
                return None
            piece = self._waiting.popleft()
            self._bytes -= piece.values.nbytes
            self._changed.notify_all()
            return piece
