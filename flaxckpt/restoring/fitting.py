"""Which saved leaf each leaf of a target gets, and what does not fit. Pure decisions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from flaxckpt.errors import Mismatch
from flaxckpt.leaves import convert
from flaxckpt.leaves.record import LeafSpec
from flaxckpt.restoring.fit import Fit
from flaxckpt.restoring.leaf import Leaf
from flaxckpt.restoring.source import SavedLeaf
from flaxckpt.tree.keypaths import parse_name
from flaxckpt.tree.match import Gaps, Sides, match
from flaxckpt.tree.node import Node, named_nodes
from flaxckpt.tree.optimizers import OPT_STATE
from flaxckpt.tree.pairing import Pairs, Place, pair, place_of, stand_ins
from flaxckpt.tree.places import known_by, places

Nodes = Sequence[Node | None]

# What errors call a kind of node that has another name in Python.
_KIND = {"none": "None"}


class Fitted(NamedTuple):
    """What belongs together.

    Attributes:
      saved: the name of the saved leaf, for each leaf of the target that gets one.
      mismatches: what does not fit.
      initialised: the leaves of the target that get a value from elsewhere.
      ignored: the saved leaves that are left out.
      in_optimizer: those of the mismatches that are about leaves of optimizers.
    """

    saved: Mapping[str, str]
    mismatches: Sequence[Mismatch]
    initialised: Sequence[str]
    ignored: Sequence[str]
    in_optimizer: Set[str]


def fit_together(
    leaves: Mapping[str, SavedLeaf],
    nodes: Nodes,
    specs: Mapping[str, LeafSpec],
    target_nodes: Nodes,
    fit: Fit,
) -> Fitted:
    """Fits saved leaves to those of a target.

    Args:
      leaves: the saved leaves by name, after the transforms.
      nodes: the structure that they were saved in.
      specs: the types of the target's leaves that are wanted, by name.
      target_nodes: the structure of the target.
      fit: what is allowed.
    """
    sides = _Sides(leaves, nodes, specs, target_nodes)
    initial = {n for n in specs if isinstance(leaf := leaves.get(n), Leaf) and leaf.is_initial}
    fresh, unused = sides.optimizer_leaves() if fit.opt_state == "reset" else (set(), set())
    left = {n: leaf for n, leaf in leaves.items() if n not in unused and n not in initial}
    wanted = {n: spec for n, spec in specs.items() if n not in fresh and n not in initial}
    pairs = sides.pairs(left, wanted)

    def problem(saved: LeafSpec, target: LeafSpec) -> str:
        why = convert.problem(saved, target, fit.dtype)
        return why or ("dtype" if convert.canonical(target).dtype != target.dtype else "")

    is_complete = len(pairs.saved) == len(left) == len(wanted)
    known = Sides(left, wanted) if is_complete else sides.with_empties(left, wanted, pairs)
    found = match(known, pairs, problem, Gaps(fit.initialises, fit.ignores))
    others = [n for n in specs if n in fresh or n in initial]
    ignored = [n for n in leaves if n in unused]
    ordered = {name: pairs.saved[name] for name in wanted if name in pairs.saved}
    return Fitted(
        ordered,
        found.mismatches,
        [*others, *found.initialised],
        [*ignored, *found.ignored],
        known.in_optimizer,
    )


@dataclasses.dataclass(frozen=True)
class _Sides:
    """A checkpoint and a target, as `fit_together` has them."""

    leaves: Mapping[str, SavedLeaf]
    nodes: Nodes
    specs: Mapping[str, LeafSpec]
    target_nodes: Nodes

    def pairs(self, leaves: Mapping[str, SavedLeaf], specs: Mapping[str, LeafSpec]) -> Pairs:
        """Which of `leaves` belongs to which of `specs`."""
        if leaves.keys() == specs.keys() and self.nodes == self.target_nodes:
            return Pairs({name: name for name in specs}, {})
        ours, theirs = self._places
        return pair(
            {name: _place(name, leaf, ours) for name, leaf in leaves.items()},
            {name: theirs[name] for name in specs},
        )

    @functools.cached_property
    def _places(self) -> tuple[Mapping[str, Place], Mapping[str, Place]]:
        """The places of all leaves of both sides."""
        ours, theirs = known_by(self.nodes), known_by(self.target_nodes)
        return places(self.nodes, theirs), places(self.target_nodes, ours)

    def with_empties(
        self, leaves: Mapping[str, SavedLeaf], specs: Mapping[str, LeafSpec], pairs: Pairs
    ) -> Sides:
        """`leaves` and `specs`, with the empty nodes in the places of those that are left over."""
        ours, theirs = self._places
        used = set(pairs.saved.values())
        in_saved = _stand_ins(
            {n: theirs[n] for n in specs if n not in pairs.saved}, self.nodes, ours
        )
        left = {n: _place(n, leaf, ours) for n, leaf in leaves.items() if n not in used}
        in_target = _stand_ins(left, self.target_nodes, theirs)
        in_optimizer = {n for n in specs if _is_of_optimizer(n, theirs)}
        in_optimizer |= {n for n in left if _is_of_optimizer(n, ours)}
        return Sides(leaves, specs, in_saved, in_target, in_optimizer)

    def optimizer_leaves(self) -> tuple[set[str], set[str]]:
        """The leaves of the target and those saved that are state of an optimizer."""
        ours, theirs = self._places
        return (
            {name for name in self.specs if _is_of_optimizer(name, theirs)},
            {name for name in self.leaves if _is_of_optimizer(name, ours)},
        )


def _place(name: str, leaf: SavedLeaf, places: Mapping[str, Place]) -> Place:
    """The place of a saved leaf; what a transform has made or moved is only known by its name."""
    moved = isinstance(leaf, Leaf) and leaf.origin != name
    return place_of(name) if moved else places[name]


def _is_of_optimizer(name: str, places: Mapping[str, Place]) -> bool:
    """Whether a leaf is state of an optimizer: in one of optax's, or below `opt_state`."""
    place = places.get(name)
    in_state = place is not None and place.state is not None
    return in_state or OPT_STATE in parse_name(name)[:-1]


def _stand_ins(
    left: Mapping[str, Place], nodes: Nodes, places: Mapping[str, Place]
) -> dict[str, str]:
    """What the empty node in the place of each of `left` is, where there is one among `nodes`."""
    shown = {
        name: f"{node.class_name.rpartition('.')[2] or _KIND.get(node.kind, node.kind)} (empty)"
        for name, node in named_nodes(nodes)
        if node is not None and not node.keys
    }
    found = stand_ins(left, {name: places[name] for name in shown})
    return {name: shown[empty] for name, empty in found.items()}
