"""The plan of a tree that was saved in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from flaxckpt.errors import UnsupportedKeyError
from flaxckpt.saving.plan import SavePlan, check_limits
from flaxckpt.tree.keypaths import component
from flaxckpt.tree.structure import flatten


class _Leaf:
    """Stands for a leaf in the structure of a part: the number of the part, and of the leaf."""

    def __init__(self, part: int, number: int):
        self.part, self.number = part, number


class Parts(NamedTuple):
    """Plans of parts, and the structure of them all, with a stand-in for each leaf."""

    plans: tuple[SavePlan, ...] = ()
    tree: Any = None

    def with_part(self, plan: SavePlan) -> Parts:
        """These and one more.

        Raises:
          UnsupportedKeyError: when a leaf of it is there already, or its parent is.
        """
        leaves = [_Leaf(len(self.plans), number) for number in range(len(plan.records))]
        part = jax.tree.unflatten(plan.treedef, leaves)
        tree = _merged(self.tree, part, "") if self.plans else part
        stored = {array.stored.store for known in self.plans for array in known.arrays}
        for array in plan.arrays:
            if array.stored.store in stored:
                raise UnsupportedKeyError(
                    f"two parts have an array that Orbax calls {array.stored.store!r}. Save them "
                    "in one part, or rename one."
                )
        return Parts((*self.plans, plan), tree)

    def merged(self) -> SavePlan:
        """One plan for all of it.

        Raises:
          UnsupportedLeafError: when that is too large.
        """
        flat = flatten(self.tree)
        by_record = [dict(_arrays(plan)) for plan in self.plans]
        order = [(leaf.part, leaf.number) for leaf in flat.leaves]
        records = tuple(self.plans[part].records[number] for part, number in order)
        arrays = tuple(by_record[p][number] for p, number in order if number in by_record[p])
        check_limits(flat, records)
        return SavePlan.of_parts(flat, records, arrays)


def _arrays(plan: SavePlan) -> Sequence[tuple[int, Any]]:
    """The arrays of a plan, by the numbers of their leaves."""
    numbers = [i for i, record in enumerate(plan.records) if record.array is not None]
    return list(zip(numbers, plan.arrays, strict=True))


def _merged(first: Any, second: Any, path: str) -> Any:
    """Two trees as one: dicts are joined, and nothing else can be.

    Raises:
      UnsupportedKeyError: when both have something else at one path.
    """
    if type(first) is not dict or type(second) is not dict:
        raise UnsupportedKeyError(
            f"two parts have something at {path or 'the root'} that is no dict in both. Parts are "
            "joined by the keys of their dicts, so give each leaf in one part only."
        )
    joined = dict(first)
    for key, value in second.items():
        name = f"{path}/{component(key)}" if path else component(key)
        joined[key] = _merged(first[key], value, name) if key in first else value
    return joined
