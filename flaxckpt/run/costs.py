"""What saves and restores cost: for logs, for metric writers, and for whoever asks."""

from __future__ import annotations

import collections
import dataclasses
from typing import Protocol

import jax

from flaxckpt.restoring.restore_report import RestoreReport


class ScalarWriter(Protocol):
    """What scalars are written to: a CLU `MetricWriter`, or anything that has this method."""

    def write_scalars(self, step: int, scalars: dict[str, float]) -> None:
        """Writes numbers by name."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one save or restore cost.

    Attributes:
      step: the step.
      leaves: how many leaves it has.
      nbytes: the size of its arrays, in bytes.
      seconds: from the call until it was committed, or restored.
      blocked_seconds: for how long of that the loop waited.
    """

    step: int
    leaves: int
    nbytes: int
    seconds: float
    blocked_seconds: float

    @property
    def gb_per_s(self) -> float:
        """Gigabytes (10^9 bytes) a second."""
        return self.nbytes / 1e9 / self.seconds if self.seconds else 0.0

    def scalars(self) -> dict[str, float]:
        """As a metric writer takes them."""
        return {
            "checkpoint/seconds": self.seconds,
            "checkpoint/blocked_ms": self.blocked_seconds * 1e3,
            "checkpoint/bytes": float(self.nbytes),
            "checkpoint/gb_per_s": self.gb_per_s,
        }

    def __str__(self) -> str:
        """A part of a line for a log."""
        return (
            f"{self.leaves} leaves, {self.nbytes / 1e6:.1f} MB in {self.seconds:.3f} s, "
            f"{self.gb_per_s:.2f} GB/s, {self.blocked_seconds * 1e3:.1f} ms blocked"
        )


@dataclasses.dataclass(frozen=True)
class Stats:
    """What a manager has done so far.

    Attributes:
      saves: how many steps it has committed.
      restores: how many it has restored.
      saved_bytes: the size of what it has committed, in bytes.
      blocked_seconds: for how long saves have kept the loop waiting.
      last_save: the cost of the last one.
      last_restore: likewise.
    """

    saves: int = 0
    restores: int = 0
    saved_bytes: int = 0
    blocked_seconds: float = 0.0
    last_save: Cost | None = None
    last_restore: Cost | None = None


class Accounts:
    """Adds up costs. Saves end in the background; what is told of them waits for the loop."""

    def __init__(self, writer: ScalarWriter | None):
        """Nothing has cost anything yet; `writer` is told of every save."""
        self.stats = Stats()
        self._writer = writer
        self._untold: collections.deque[Cost] = collections.deque()

    def saved(self, cost: Cost) -> None:
        """Notes a save; called in the background."""
        stats = self.stats
        self.stats = dataclasses.replace(
            stats,
            saves=stats.saves + 1,
            saved_bytes=stats.saved_bytes + cost.nbytes,
            blocked_seconds=stats.blocked_seconds + cost.blocked_seconds,
            last_save=cost,
        )
        _monitor("save", cost)
        self._untold.append(cost)

    def restored(self, step: int, report: RestoreReport) -> None:
        """Notes a restore."""
        seconds = report.seconds
        cost = Cost(step, len(report.restored), report.nbytes, seconds, seconds)
        restores = self.stats.restores + 1
        self.stats = dataclasses.replace(self.stats, restores=restores, last_restore=cost)
        _monitor("restore", cost)

    def tell(self) -> None:
        """Writes the scalars of the saves that have ended; on the loop's own thread."""
        while self._untold:
            cost = self._untold.popleft()
            if self._writer is not None:
                self._writer.write_scalars(cost.step, cost.scalars())


def _monitor(what: str, cost: Cost) -> None:
    """Tells those who listen to jax's monitoring."""
    jax.monitoring.record_event_duration_secs(f"/flaxckpt/{what}/seconds", cost.seconds)
    jax.monitoring.record_event_duration_secs(f"/flaxckpt/{what}/blocked", cost.blocked_seconds)
    jax.monitoring.record_event(f"/flaxckpt/{what}/bytes", bytes=cost.nbytes)
