"""What a restore will do with each leaf, decided before an array is read. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from flaxckpt.errors import Mismatch, ShardingError, StructureMismatchError
from flaxckpt.leaves import convert, handler
from flaxckpt.leaves.record import LeafSpec
from flaxckpt.options import Options
from flaxckpt.restoring import placement
from flaxckpt.restoring.advice import advice_for
from flaxckpt.restoring.fit import Fit
from flaxckpt.restoring.fitting import fit_together
from flaxckpt.restoring.leaf import Leaf, as_record
from flaxckpt.restoring.replicas import Replica
from flaxckpt.restoring.selection import Saved, nested, readable, select
from flaxckpt.restoring.source import SavedLeaf, Source
from flaxckpt.transforms.rule import transformed
from flaxckpt.tree.node import Node
from flaxckpt.tree.rebuild import build
from flaxckpt.tree.select import selector, subtree_of
from flaxckpt.tree.structure import Flat


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
    record: SavedLeaf
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


def without_target(
    source: Source, fit: Fit, options: Options
) -> tuple[Plan, Sequence[Node | None] | None]:
    """Every leaf as it was saved, and the structure, if it still is the saved one.

    Raises:
      StructureMismatchError: when jax cannot hold a saved dtype now, and no cast was asked for.
    """
    saved = select(source, fit.only)
    leaves = _transformed(source, saved, {}, fit, options)
    plans, mismatches = [], []
    for name, leaf in leaves.items():
        wanted = leaf.spec
        if fit.as_numpy and wanted.kind == "jax":
            wanted = LeafSpec("numpy", wanted.dtype, wanted.shape)
        held = convert.canonical(wanted)
        if held.dtype != wanted.dtype and not fit.is_lossy:
            note = "(jax_enable_x64 is off)"
            mismatches.append(Mismatch("dtype", name, str(wanted), str(held), note))
        plans.append(LeafPlan(name, as_record(leaf), held, lossy=fit.is_lossy))
    advice = 'Set jax_enable_x64, pass as_numpy=True, or allow the loss with dtype="cast".'
    raise_any(source, mismatches, len(plans), advice)
    return Plan(plans), saved.nodes if saved.is_whole and not fit.transforms else None


def rebuilt(plan: Plan, nodes: Sequence[Node | None] | None, values: Sequence[Any]) -> Any:
    """The tree over `values`: with the saved containers where they are known, else dicts."""
    if nodes is not None:
        return build(nodes, values)
    return nested({leaf.name: v for leaf, v in zip(plan.leaves, values, strict=True)})


def with_target(source: Source, target: Flat, fit: Fit, options: Options) -> Plan:
    """Every leaf of the target, with the saved leaf that belongs to it.

    Raises:
      StructureMismatchError: when the two do not fit.
      RuleError: when `only`, a transform or a pattern fits nothing.
    """
    saved = select(source, fit.only)
    there = dict(zip(target.names, target.leaves, strict=True))
    leaves = _transformed(source, saved, there, fit, options)
    wanted = _wanted(there, leaves, fit)
    fit.check_patterns(list(leaves), list(wanted))
    specs = {name: handler.describe(leaf, name)[0] for name, leaf in wanted.items()}
    fitted = fit_together(leaves, saved.nodes, specs, target.nodes, fit)
    if fitted.mismatches:
        advice = advice_for(fitted.mismatches, fitted.in_optimizer)
        total = len(leaves) + len(specs) - len(fitted.saved)
        raise_any(source, fitted.mismatches, total, advice)
    plans = [
        LeafPlan(
            name, as_record(leaves[found]), specs[name], _sharding(name, wanted[name]), fit.is_lossy
        )
        for name, found in fitted.saved.items()
    ]
    origins = {name: _origin(leaves[found], found) for name, found in fitted.saved.items()}
    moved = {name: origin for name, origin in origins.items() if origin not in (None, name)}
    return Plan(plans, fitted.initialised, fitted.ignored, moved)


def _transformed(
    source: Source, saved: Saved, target: Mapping[str, Any], fit: Fit, options: Options
) -> Mapping[str, SavedLeaf]:
    """The leaves of `saved`, as the transforms give them."""
    if not fit.transforms:
        return saved.leaves
    return transformed(readable(source, saved, options), target, fit.transforms)


def _origin(leaf: SavedLeaf, name: str) -> str | None:
    """What the leaf `name` is called in the checkpoint; `None` when a transform has made it."""
    return leaf.origin if isinstance(leaf, Leaf) else name


def _wanted(
    target: Mapping[str, Any], saved: Mapping[str, SavedLeaf], fit: Fit
) -> Mapping[str, Any]:
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
