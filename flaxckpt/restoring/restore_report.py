"""What a restore did, leaf by leaf."""

from __future__ import annotations

import dataclasses

from etils import epath

from flaxckpt.restoring.restore_plan import LeafPlan, Plan
from flaxckpt.sharding.specs import describe_sharding
from flaxckpt.source.checkpoint import Source


@dataclasses.dataclass(frozen=True)
class RestoreReport:
    """What a restore did. Leaves are named as in the target, if there was one.

    Attributes:
      path: the checkpoint.
      restored: the leaves that were restored.
      initialised: the leaves that the checkpoint lacks and that have a value from elsewhere.
      renamed: leaves that have another name in the checkpoint: that name, and theirs. An optimizer
        whose states have moved is found here.
      cast: leaves that came back as another type than they were saved with: name, saved type,
        restored type.
      saved_dtype: leaves that came back in the checkpoint's dtype instead of the target's, as
        `dtype="saved"` allows: name, target's type, restored type.
      ignored: the leaves of the checkpoint that were left out.
      resharded: leaves that lie on another mesh, or are cut in another way, than when they were
        saved.
      nbytes: the size of the restored arrays, in bytes.
      seconds: how long it took.
      damaged: newer steps that were passed over because they are damaged, each with its error.
    """

    path: epath.Path
    restored: tuple[str, ...]
    initialised: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    cast: tuple[tuple[str, str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    resharded: tuple[str, ...] = ()
    nbytes: int = 0
    seconds: float = 0.0
    damaged: tuple[tuple[int, str], ...] = ()
    saved_dtype: tuple[tuple[str, str, str], ...] = ()

    @property
    def gb_per_s(self) -> float:
        """Gigabytes (10^9 bytes) a second."""
        return self.nbytes / 1e9 / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        """One line for a log."""
        counts = "".join(
            f", {len(getattr(self, field))} {field}"
            for field in ("initialised", "renamed", "cast", "ignored", "resharded")
            if getattr(self, field)
        )
        if self.saved_dtype:
            counts += f", {len(self.saved_dtype)} in the saved dtype"
        passed = ", ".join(str(step) for step, _ in self.damaged)
        damaged = f" (passed over, damaged: {passed})" if passed else ""
        return (
            f"restored {len(self.restored)} leaves{counts}, {self.nbytes / 1e6:.1f} MB in "
            f"{self.seconds:.3f} s, {self.gb_per_s:.2f} GB/s from {self.path}{damaged}"
        )


def report_of(source: Source, plan: Plan, seconds: float) -> RestoreReport:
    """The report of a restore that did `plan`."""
    changed = [leaf for leaf in plan.leaves if leaf.record.spec != leaf.wanted]
    types = ((leaf.name, str(leaf.record.spec), str(leaf.wanted)) for leaf in changed)
    own = plan.own_types
    return RestoreReport(
        path=epath.Path(source.path),
        restored=tuple(leaf.name for leaf in plan.leaves),
        initialised=tuple(plan.initialised),
        renamed=tuple((saved, name) for name, saved in plan.saved_as.items()),
        cast=tuple(row for row in types if row[1] != row[2]),
        saved_dtype=tuple(
            (leaf.name, own[leaf.name], str(leaf.wanted))
            for leaf in plan.leaves
            if leaf.name in own
        ),
        ignored=tuple(plan.ignored),
        resharded=tuple(leaf.name for leaf in plan.leaves if _is_resharded(leaf)),
        nbytes=sum(leaf.record.nbytes for leaf in plan.leaves),
        seconds=seconds,
    )


def _is_resharded(leaf: LeafPlan) -> bool:
    """Whether the array of a leaf lies in another way than when it was saved."""
    array = leaf.record.array
    return array is not None and array.sharding != describe_sharding(leaf.where)
