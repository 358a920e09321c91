"""What a run remembers of its saves, as facts; what makes no sense is left out. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from flaxckpt.metadata.past import PastSave
from flaxckpt.reporting.facts import Save


def saves_of(past: Iterable[PastSave]) -> list[Save]:
    """The saves, each with how long the loop had trained before it.

    Example:
      >>> past = [PastSave(1, 10.0, 2.0, 0.5, 1, 8, {}), PastSave(2, 20.0, 3.0, 0.5, 1, 8, {})]
      >>> [save.trained for save in saves_of(past)]  # from 8.5 to 17
      [None, 8.5]
    """
    found: list[Save] = []
    since: float | None = None
    for save in past:
        if not all(map(math.isfinite, (save.time, save.seconds, save.blocked_seconds))):
            continue
        began = save.time - save.seconds
        trained = None if since is None or began < since else began - since
        # Nobody noted for how long the last save of a process blocked it. So the time until the
        # next one, which is of another process, is not taken for training.
        blocked = save.blocked_seconds or None
        since = None if blocked is None else began + blocked
        metrics = finite(save.metrics)
        found.append(Save(save.step, save.time, save.seconds, blocked, trained, metrics))
    return found


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those of the metrics that are finite numbers."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
