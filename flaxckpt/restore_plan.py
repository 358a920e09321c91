"""What a restore will do with each leaf, decided before an array is read. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from flaxckpt import placement
from flaxckpt.checkpoint import Checkpoint
from flaxckpt.errors import Mismatch, ShardingError, StructureMismatchError
from flaxckpt.leaves import convert, handler
from flaxckpt.leaves.convert import DtypePolicy
from flaxckpt.leaves.record import LeafRecord, LeafSpec
from flaxckpt.replicas import Replica
from flaxckpt.tree.containers import Node
from flaxckpt.tree.match import match
from flaxckpt.tree.structure import Flat, named_nodes


class LeafPlan(NamedTuple):
    """One leaf to restore.

    Attributes:
      record: what was saved.
      wanted: what it becomes.
      where: the sharding that it becomes it on; `None` for the default device, or the host.
      replica: the copy of its array that is read for all.
      lossy: whether a number may lose what the wanted dtype cannot hold.
    """

    record: LeafRecord
    wanted: LeafSpec
    where: jax.sharding.Sharding | None = None
    lossy: bool = False
    replica: Replica | None = None


def without_target(checkpoint: Checkpoint, as_numpy: bool, dtype: DtypePolicy) -> list[LeafPlan]:
    """Every leaf as it was saved.

    Raises:
      StructureMismatchError: when jax cannot hold a saved dtype now, and no cast was asked for.
    """
    leaves, mismatches = [], []
    for record in checkpoint.tree.records:
        wanted = record.spec
        if as_numpy and wanted.kind == "jax":
            wanted = LeafSpec("numpy", wanted.dtype, wanted.shape)
        held = convert.canonical(wanted)
        if held.dtype != wanted.dtype and dtype != "cast":
            note = "(jax_enable_x64 is off)"
            mismatches.append(Mismatch("dtype", record.name, str(wanted), str(held), note))
        leaves.append(LeafPlan(record, held, lossy=dtype == "cast"))
    advice = 'Set jax_enable_x64, pass as_numpy=True, or allow the loss with dtype="cast".'
    raise_any(checkpoint, mismatches, len(leaves), advice)
    return leaves


def with_target(checkpoint: Checkpoint, target: Flat, dtype: DtypePolicy) -> list[LeafPlan]:
    """Every leaf of the target, with the record of the same name.

    Raises:
      StructureMismatchError: when the two do not fit.
    """
    records = {record.name: record for record in checkpoint.tree.records}
    leaves = dict(zip(target.names, target.leaves, strict=True))
    specs = {name: handler.describe(leaf, name)[0] for name, leaf in leaves.items()}

    def problem(saved: LeafSpec, wanted: LeafSpec) -> str:
        why = convert.problem(saved, wanted, dtype)
        return why or ("dtype" if convert.canonical(wanted).dtype != wanted.dtype else "")

    saved = {name: record.spec for name, record in records.items()}
    if match(saved, specs, problem):  # once more, with what stands in the place of what is missing
        saved_empties, target_empties = _empties(checkpoint.tree.nodes), _empties(target.nodes)
        mismatches = match(
            saved, specs, problem, saved_empties=saved_empties, target_empties=target_empties
        )
        raise_any(checkpoint, mismatches, len(records.keys() | specs.keys()), _advice(mismatches))
    return [
        LeafPlan(records[name], specs[name], _sharding(name, leaf), dtype == "cast")
        for name, leaf in leaves.items()
    ]


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


def _empties(nodes: Sequence[Node | None]) -> dict[str, str]:
    """The empty nodes by name, as errors show them."""
    return {
        name: f"{node.class_name.rpartition('.')[2] or node.kind} (empty)"
        for name, node in named_nodes(nodes)
        if node is not None and not node.keys
    }


def _advice(mismatches: Sequence[Mismatch]) -> str:
    """One thing to do about `mismatches`."""
    problems = {m.problem for m in mismatches}
    if problems <= {"dtype"}:
        return (
            'Give the target the saved dtypes, or pass dtype="cast" (dtype="widen" for floats '
            "to wider floats only). 64-bit types need jax_enable_x64."
        )
    if problems <= {"shape"}:
        return "Build the target with the sizes that the checkpoint was saved with."
    if problems <= {"key impl"}:
        return "Make the target's keys with the implementation that the checkpoint has."
    return "Build the target the way the saved state was built, or restore without a target."


def raise_any(
    checkpoint: Checkpoint, mismatches: Sequence[Mismatch], total: int, advice: str
) -> None:
    """Raises when there is a mismatch."""
    if mismatches:
        raise StructureMismatchError(str(checkpoint.path), mismatches, total, advice)
