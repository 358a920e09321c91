"""The plan of a restore: which leaf becomes which."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax

from flaxckpt.errors import Mismatch, ShardingError, StructureMismatchError
from flaxckpt.leaves import conversion, kinds
from flaxckpt.leaves.spec import LeafSpec
from flaxckpt.restoring import placement
from flaxckpt.restoring.fit import Fit, Saved, nested, select
from flaxckpt.restoring.placement import Replica
from flaxckpt.source.checkpoint import Source
from flaxckpt.source.leaf import Leaf
from flaxckpt.transforms import transformed
from flaxckpt.tree.keypaths import parse_name, selector, subtree_of
from flaxckpt.tree.match import (
    OPT_STATE,
    Gaps,
    Pairs,
    Place,
    Sides,
    known_by,
    match,
    pair,
    place_of,
    places,
    stand_ins,
)
from flaxckpt.tree.node import Node, named_nodes
from flaxckpt.tree.rebuild import build
from flaxckpt.tree.structure import Flat

# One thing to do about a checkpoint that does not fit. Pure decisions.


_GUESS = re.compile(r"\(did you mean (.*)\?\)")


def advice_for(mismatches: Sequence[Mismatch], in_optimizer: Set[str]) -> str:
    """One thing to do about `mismatches`: about those that explain most of the others.

    Args:
      mismatches: at least one.
      in_optimizer: the names of those that are leaves of optimizers, at least.
    """
    problems, names = {m.problem for m in mismatches}, {m.name for m in mismatches}
    guessed = [(m, found[1]) for m in mismatches if (found := _GUESS.fullmatch(m.note))]
    if "ambiguous" in problems:
        return (
            "Say which it is with transforms=[flaxckpt.Rename(...)], or begin the optimizer anew "
            'with opt_state="reset".'
        )
    if guessed:
        types = {m.name: m.checkpoint for m in mismatches}
        alike = [pair for pair in guessed if types.get(pair[1]) == pair[0].target]
        row, saved = (alike or guessed)[0]
        return _about_guess(row.name, saved)
    if problems <= {"missing", "unexpected"}:
        what = "optimizer" if names <= in_optimizer else "target"
        return _about_gaps(what)
    if "empty" in problems:
        return _about_empties(next(m for m in mismatches if m.problem == "empty"))
    return _about_types(problems) or _about_gaps("target")


def _about_guess(name: str, saved: str) -> str:
    """What to do when the leaf `name` may be the saved one."""
    pattern, replacement = rename(saved, name)
    rule = f"flaxckpt.Rename({_code(pattern)}, {_code(replacement)})"
    return (
        f"If that is meant, pass transforms=[{rule}]; gaps are allowed with "
        'missing="init" and unexpected="ignore".'
    )


def _about_gaps(what: str) -> str:
    """What to do about leaves that only one side has."""
    if what == "optimizer":
        return (
            "Build the optimizer the way the saved one was built, begin it anew with "
            'opt_state="reset", or allow gaps with missing="init" and unexpected="ignore".'
        )
    return (
        "Build the target the way the saved state was built, or allow gaps with "
        'missing="init" and unexpected="ignore".'
    )


def _about_types(problems: set[str]) -> str | None:
    """What to do when only types differ."""
    if problems <= {"dtype"}:
        return (
            'Give the target the saved dtypes, or pass dtype="cast" (dtype="widen" for floats '
            "to wider floats only). 64-bit types need jax_enable_x64."
        )
    if problems <= {"shape"}:
        return (
            "Build the target with the sizes that the checkpoint was saved with, or change the "
            "arrays with flaxckpt.Resize(pattern, pad=0) or flaxckpt.Apply(pattern, fn)."
        )
    if problems <= {"key impl"}:
        return "Make the target's keys with the implementation that the checkpoint has."
    return None


def _about_empties(row: Mismatch) -> str:
    """What to do about an array in the place of an empty node."""
    name = re.escape(row.name)
    if "(empty)" in row.checkpoint:
        return (
            "Build the target the way the saved state was built, or take its own value with "
            f'transforms=[flaxckpt.Fallback({_code(name)}, "target")].'
        )
    return (
        "Build the target the way the saved state was built, or leave the array out with "
        f"transforms=[flaxckpt.Drop({_code(name)})]."
    )


def rename(saved: str, target: str) -> tuple[str, str]:
    r"""A pattern and a replacement that make `target` of `saved`, and so of its siblings.

    Example:
      >>> rename("params/classifier/kernel", "params/head/kernel")
      ('params/classifier/(.*)', 'params/head/\\1')
    """
    old, new = saved.split("/"), target.split("/")
    same = 0
    while same < min(len(old), len(new)) - 1 and old[-1 - same] == new[-1 - same]:
        same += 1
    if not same:
        return re.escape(saved), _literal(target)
    before, after = "/".join(old[:-same]), "/".join(new[:-same])
    return f"{re.escape(before)}/(.*)", rf"{_literal(after)}/\1"


def _literal(text: str) -> str:
    """`text` as a replacement that has no groups."""
    return text.replace("\\", r"\\")


def _code(text: str) -> str:
    """`text` as one would write it in Python."""
    if not text.isprintable() or '"' in text:
        return repr(text)
    return f'r"{text}"' if "\\" in text else f'"{text}"'


# Which saved leaf each leaf of a target gets, and what does not fit. Pure decisions.


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
    leaves: Mapping[str, Leaf],
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
    initial = {n for n in specs if (leaf := leaves.get(n)) is not None and leaf.is_initial}
    fresh, unused = sides.optimizer_leaves() if fit.opt_state == "reset" else (set(), set())
    left = {n: leaf for n, leaf in leaves.items() if n not in unused and n not in initial}
    wanted = {n: spec for n, spec in specs.items() if n not in fresh and n not in initial}
    pairs = sides.pairs(left, wanted)

    def problem(saved: LeafSpec, target: LeafSpec) -> str:
        why = conversion.problem(saved, target, fit.dtype)
        return why or ("dtype" if conversion.canonical(target).dtype != target.dtype else "")

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

    leaves: Mapping[str, Leaf]
    nodes: Nodes
    specs: Mapping[str, LeafSpec]
    target_nodes: Nodes

    def pairs(self, leaves: Mapping[str, Leaf], specs: Mapping[str, LeafSpec]) -> Pairs:
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
        self, leaves: Mapping[str, Leaf], specs: Mapping[str, LeafSpec], pairs: Pairs
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


def _place(name: str, leaf: Leaf, places: Mapping[str, Place]) -> Place:
    """The place of a saved leaf; what a transform has made or moved is only known by its name."""
    moved = leaf.origin != name
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


# What a restore will do with each leaf, decided before an array is read. No I/O.


class LeafPlan(NamedTuple):
    """One leaf to restore.

    Attributes:
      name: what it is called where it is restored to.
      record: what was saved.
      wanted: what it becomes.
      where: the sharding that it becomes it on; `None` for the default device, or the host.
      lossy: whether a number may lose what the wanted dtype cannot hold.
      replica: the copy of its array that is read for all.
    """

    name: str
    record: Leaf
    wanted: LeafSpec
    where: jax.sharding.Sharding | None = None
    lossy: bool = False
    replica: Replica | None = None


class Plan(NamedTuple):
    """A restore.

    Attributes:
      leaves: those that are restored.
      initialised: the names of the leaves of the target that get a value from elsewhere.
      ignored: the names of the saved leaves that are left out, because that is allowed.
      saved_as: what each restored leaf is called in the checkpoint, where that is another name.
    """

    leaves: Sequence[LeafPlan]
    initialised: Sequence[str] = ()
    ignored: Sequence[str] = ()
    saved_as: Mapping[str, str] = {}


def without_target(source: Source, fit: Fit) -> tuple[Plan, Sequence[Node | None] | None]:
    """Every leaf as it was saved, and the structure, if it still is the saved one.

    Raises:
      StructureMismatchError: when jax cannot hold a saved dtype now, and no cast was asked for.
    """
    saved = select(source, fit.only)
    leaves = _transformed(saved, {}, fit)
    plans, mismatches = [], []
    for name, leaf in leaves.items():
        wanted = leaf.spec
        if fit.as_numpy and wanted.kind == "jax":
            wanted = LeafSpec("numpy", wanted.dtype, wanted.shape)
        held = conversion.canonical(wanted)
        if held.dtype != wanted.dtype and not fit.is_lossy:
            note = "(jax_enable_x64 is off)"
            mismatches.append(Mismatch("dtype", name, str(wanted), str(held), note))
        plans.append(LeafPlan(name, leaf, held, lossy=fit.is_lossy))
    advice = 'Set jax_enable_x64, pass as_numpy=True, or allow the loss with dtype="cast".'
    raise_any(source, mismatches, len(plans), advice)
    return Plan(plans), saved.nodes if saved.is_whole and not fit.transforms else None


def rebuilt(plan: Plan, nodes: Sequence[Node | None] | None, values: Sequence[Any]) -> Any:
    """The tree over `values`: with the saved containers where they are known, else dicts."""
    if nodes is not None:
        return build(nodes, values)
    return nested({leaf.name: v for leaf, v in zip(plan.leaves, values, strict=True)})


def with_target(source: Source, target: Flat, fit: Fit) -> Plan:
    """Every leaf of the target, with the saved leaf that belongs to it.

    Raises:
      StructureMismatchError: when the two do not fit.
      RuleError: when `only`, a transform or a pattern fits nothing.
    """
    saved = select(source, fit.only)
    there = dict(zip(target.names, target.leaves, strict=True))
    leaves = _transformed(saved, there, fit)
    wanted = _wanted(there, leaves, fit)
    fit.check_patterns(list(leaves), list(wanted))
    specs = {name: kinds.describe(leaf, name)[0] for name, leaf in wanted.items()}
    fitted = fit_together(leaves, saved.nodes, specs, target.nodes, fit)
    if fitted.mismatches:
        advice = advice_for(fitted.mismatches, fitted.in_optimizer)
        total = len(leaves) + len(specs) - len(fitted.saved)
        raise_any(source, fitted.mismatches, total, advice)
    plans = [
        LeafPlan(name, leaves[found], specs[name], _sharding(name, wanted[name]), fit.is_lossy)
        for name, found in fitted.saved.items()
    ]
    origins = {name: leaves[found].origin for name, found in fitted.saved.items()}
    moved = {name: origin for name, origin in origins.items() if origin not in (None, name)}
    return Plan(plans, fitted.initialised, fitted.ignored, moved)


def _transformed(saved: Saved, target: Mapping[str, Any], fit: Fit) -> Mapping[str, Leaf]:
    """The leaves of `saved`, as the transforms give them."""
    return transformed(dict(saved.leaves), target, fit.transforms)


def _wanted(target: Mapping[str, Any], saved: Mapping[str, Leaf], fit: Fit) -> Mapping[str, Any]:
    """The leaves of the target that are to be restored.

    With patterns these are what they select, and what the transforms made of that.
    """
    if fit.only is None or subtree_of(fit.only) is not None:
        return target
    is_selected = selector(fit.only)
    return {n: leaf for n, leaf in target.items() if is_selected(n) or n in saved}


def _sharding(name: str, leaf: Any) -> jax.sharding.Sharding | None:
    """Where the leaf `name` of a target lies.

    Raises:
      ShardingError: when that is not possible for an array of its shape.
    """
    where = placement.target_sharding(leaf)
    if where is None or isinstance(where, jax.sharding.SingleDeviceSharding):
        return where
    try:
        where.shard_shape(leaf.shape)
    except ValueError as error:
        raise ShardingError(
            f"{name} cannot be restored onto its sharding: {error}.\n"
            f"  sharding: {where}\n  shape:    {leaf.shape}\nChange the target's sharding."
        ) from None
    return where


def raise_any(source: Source, mismatches: Sequence[Mismatch], total: int, advice: str) -> None:
    """Raises when there is a mismatch."""
    if mismatches:
        raise StructureMismatchError(str(source.path), mismatches, total, advice)
