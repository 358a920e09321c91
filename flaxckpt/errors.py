"""Every error that flaxckpt raises on purpose: a closed list, all subclasses of `FlaxckptError`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


class FlaxckptError(Exception):
    """Base of every error of this library."""


class CheckpointNotFoundError(FlaxckptError, FileNotFoundError):
    """There is no committed checkpoint at a path, or no such step in a run."""


class CorruptCheckpointError(FlaxckptError):
    """Bytes of a checkpoint are missing, truncated, or do not match their checksum."""


class UnsupportedFormatError(FlaxckptError):
    """The checkpoint was written in a format version that this flaxckpt does not know."""


class UnsupportedLeafError(FlaxckptError, TypeError):
    """A leaf of the tree cannot be held by a checkpoint."""


class ItemError(FlaxckptError, ValueError):
    """An item cannot be held by a checkpoint, or does not fit what it is to be restored into."""


class UnsupportedKeyError(FlaxckptError, TypeError):
    """A key of the tree cannot be written down, or two children of a node share one."""


class RuleError(FlaxckptError, ValueError):
    """A rule of a restore (`only`, a transform, a pattern) fits nothing, or not what it finds."""


class ShardingError(FlaxckptError, ValueError):
    """A PartitionSpec does not fit its array or its mesh."""


class ArgumentError(FlaxckptError, TypeError):
    """An argument is unknown, or of the wrong type."""


class InvalidStepError(FlaxckptError, ValueError):
    """A step is not an integer of at least zero."""


class InvalidMetricError(FlaxckptError, ValueError):
    """A metric is not a number, or the run needs one that was not given."""


class StepExistsError(FlaxckptError, FileExistsError):
    """The step (or path) already holds a checkpoint."""


class StepPinnedError(FlaxckptError):
    """The step is pinned and may not be deleted."""


class DirectoryError(FlaxckptError, OSError):
    """A directory cannot be used: it is a file, or may not be written."""


class StoreError(FlaxckptError, OSError):
    """An object store cannot be reached, refuses a request, or does not answer in time."""


class ProcessFailedError(FlaxckptError, RuntimeError):
    """Another process of the job failed, or did something else than this one."""


class ProcessTimeoutError(FlaxckptError, TimeoutError):
    """Other processes of the job did not reach a barrier within `Options.timeout_secs`."""


class ManagerError(FlaxckptError, RuntimeError):
    """The manager is closed, was opened read-only, or its `on_commit` raised."""


class BackgroundSaveError(FlaxckptError, RuntimeError):
    """A save failed in the background; `__cause__` is what happened there."""


class SaveTimeoutError(FlaxckptError, TimeoutError):
    """A save in the background took longer than `Options.timeout_secs`."""


class ResumeMismatchError(FlaxckptError, AssertionError):
    """A resumed run ended in other bits than an uninterrupted one."""


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """One leaf on which the checkpoint and the target disagree.

    Attributes:
      problem: `missing`, `unexpected`, `empty` (one side has an empty node there), `ambiguous`
        (several leaves may be meant), `shape`, `dtype`, `kind` or `key impl`.
      name: the key path of the leaf.
      checkpoint: the checkpoint's side, such as `float32[512,10]`; `-` where it has none.
      target: the target's side, in the same form.
      note: what else is known, such as the name that was probably meant.
    """

    problem: str
    name: str
    checkpoint: str
    target: str
    note: str = ""


class StructureMismatchError(FlaxckptError, ValueError):
    """The checkpoint does not fit the target; `mismatches` holds every leaf that differs."""

    def __init__(self, path: str, mismatches: Sequence[Mismatch], total: int, advice: str):
        """Lists `mismatches`, out of `total` leaves of both sides, and one thing to do."""
        self.mismatches = tuple(mismatches)
        head = f"the checkpoint at {path} does not fit the target"
        count = f"({len(self.mismatches)} of {total} leaves)"
        super().__init__("\n".join([f"{head} {count}", *_rows(self.mismatches), advice]))


def _rows(mismatches: Sequence[Mismatch]) -> list[str]:
    """The mismatches as lines with aligned columns."""
    width = [
        max(len(getattr(m, field)) for m in mismatches)
        for field in ("problem", "name", "checkpoint", "target")
    ]
    return [
        f"  {m.problem:<{width[0]}}  {m.name:<{width[1]}}"
        f"  checkpoint: {m.checkpoint:<{width[2]}}"
        f"  target: {m.target:<{width[3]}}  {m.note}".rstrip()
        for m in mismatches
    ]
