"""What is to be restored of a run, and doing it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from flaxckpt.items.encoded import Place
from flaxckpt.items.restoring import WantedItems
from flaxckpt.restoring.fit import Fit
from flaxckpt.restoring.report import RestoreReport
from flaxckpt.restoring.restore import Initialise, restore_tree
from flaxckpt.runs.sources import Sources
from flaxckpt.runs.steps import check_step

OnCorrupt = Literal["raise", "previous"]


class Restored(NamedTuple):
    """What was restored: the step, its tree, what was done, and the items that were asked for."""

    step: int
    tree: Any
    report: RestoreReport
    items: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Restoration:
    """A restore that a manager is asked for; the attributes are the arguments of its `restore`.

    What the step lacks may be made by `initialise`.

    Raises:
      ValueError: when `on_corrupt` is something else.
    """

    target: Any
    fit: Fit
    step: int | None
    on_corrupt: OnCorrupt
    items: Mapping[str, Any] | None
    initialise: Initialise | None = None

    def __post_init__(self) -> None:
        """Checks `on_corrupt`."""
        if self.on_corrupt not in ("raise", "previous"):
            raise ValueError(f"on_corrupt={self.on_corrupt!r} must be raise or previous")

    def carry_out(self, sources: Sources) -> Restored:
        """Restores the tree and the items: both of one step, or neither."""
        restore = functools.partial(
            restore_tree,
            target=self.target,
            fit=self.fit,
            options=sources.options,
            initialise=self.initialise,
        )
        place = Place(sources.group.index, sources.group.count)
        items = WantedItems(self.items or {}, place, sources.options)
        step = self.step if self.step is None else check_step(self.step)
        older = self.on_corrupt == "previous"
        found = sources.restore(items.with_tree(restore), step, older=older)
        return Restored(*found, items.finish())
