"""Waiting for the steps of a run as somebody else commits them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence


def follow(
    steps: Callable[[], Sequence[int]],
    clock: Callable[[], float],
    timeout_secs: float | None,
    poll_secs: float,
) -> Iterator[int]:
    """Yields each of `steps()` that is newer than those before, as it appears.

    Args:
      steps: lists the committed steps.
      clock: seconds.
      timeout_secs: ends after so many seconds without a new step; `None` for never.
      poll_secs: how often to look.
    """
    seen, since = -1, clock()
    while True:
        for step in steps():
            if step > seen:
                seen = step
                yield step
                since = clock()
        if timeout_secs is not None and clock() - since >= timeout_secs:
            return
        threading.Event().wait(poll_secs)
