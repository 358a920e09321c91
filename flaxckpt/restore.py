"""Restoring one checkpoint, with a target or without."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax

from flaxckpt import collector
from flaxckpt.checkpoint import Checkpoint, open_checkpoint, unchanged
from flaxckpt.leaf_values import read_leaves
from flaxckpt.leaves.convert import DtypePolicy
from flaxckpt.options import Options
from flaxckpt.restore_plan import LeafPlan, with_target, without_target
from flaxckpt.storage.location import PathLike
from flaxckpt.tree import nnx_objects
from flaxckpt.tree.rebuild import build
from flaxckpt.tree.structure import flatten


@dataclasses.dataclass(frozen=True)
class RestoreReport:
    """What a restore did.

    Attributes:
      path: the checkpoint.
      restored: the names of the leaves that were restored, in the target's order.
      converted: of those, the ones that came back as another type than they were saved with:
        name, saved type, restored type.
      nbytes: the size of the restored arrays, in bytes.
      seconds: how long it took.
      damaged: newer steps that were passed over because they are damaged, each with its error.
    """

    path: str
    restored: tuple[str, ...]
    converted: tuple[tuple[str, str, str], ...]
    nbytes: int
    seconds: float
    damaged: tuple[tuple[int, str], ...] = ()

    def __str__(self) -> str:
        """One line for a log."""
        changed = f", {len(self.converted)} converted" if self.converted else ""
        passed = ", ".join(str(step) for step, _ in self.damaged)
        damaged = f" (passed over, damaged: {passed})" if passed else ""
        return (
            f"restored {len(self.restored)} leaves{changed}, {self.nbytes / 1e6:.1f} MB in "
            f"{self.seconds:.3f} s from {self.path}{damaged}"
        )


def restore(
    path: PathLike,
    target: Any = None,
    *,
    as_numpy: bool = False,
    dtype: DtypePolicy = "error",
    options: Options = Options(),
) -> Any:
    """Restores the checkpoint at `path`.

    Args:
      path: the directory of one checkpoint, or its URL; a step of a run is one too.
      target: a tree like the one that was saved, concrete or abstract (`abstract_state`,
        `jax.eval_shape`). The result has its containers, leaf types and shardings. Without a
        target the saved containers are rebuilt (see `register_node`); what was a `jax.Array` is
        one on the default device.
      as_numpy: without a target, whether jax arrays come back as numpy arrays. (PRNG keys have no
        numpy form and stay jax arrays.)
      dtype: whether dtypes may change: `error` never, `widen` floats to wider floats, `cast` any.
      options: how to read.

    Raises:
      CheckpointNotFoundError: when there is no checkpoint at `path`.
      StructureMismatchError: when it does not fit the target; every leaf that differs is listed.
      CorruptCheckpointError: when bytes are missing or do not match their checksum.

    Example:
      >>> flaxckpt.save(tmp_path / "exported", {"step": 7})
      >>> flaxckpt.restore(tmp_path / "exported")
      {'step': 7}
    """
    checkpoint = open_checkpoint(path, options)
    return restore_tree(checkpoint, target, as_numpy=as_numpy, dtype=dtype, options=options)[0]


@collector.paused()
def restore_tree(
    checkpoint: Checkpoint,
    target: Any,
    *,
    as_numpy: bool = False,
    dtype: DtypePolicy = "error",
    options: Options = Options(),
) -> tuple[Any, RestoreReport]:
    """As `restore`, from an open checkpoint and with a report."""
    start = time.monotonic()
    tree, leaves = _restore(checkpoint, target, as_numpy, dtype, options)
    return tree, _report(checkpoint, leaves, time.monotonic() - start)


def _restore(
    checkpoint: Checkpoint, target: Any, as_numpy: bool, dtype: DtypePolicy, options: Options
) -> tuple[Any, Sequence[LeafPlan]]:
    """The tree, and what was done for each leaf of it."""
    if target is None:
        leaves = without_target(checkpoint, as_numpy, dtype)
        tree = build(checkpoint.tree.nodes, _read(checkpoint, leaves, options))
    else:
        stateful, graphs = nnx_objects.split(target)
        leaves = with_target(checkpoint, flatten(stateful), dtype)
        values = _read(checkpoint, leaves, options)
        tree = jax.tree.unflatten(jax.tree.structure(stateful), values)
        tree = nnx_objects.merge(tree, graphs)
    return tree, leaves


def _read(checkpoint: Checkpoint, leaves: Sequence[LeafPlan], options: Options) -> list[Any]:
    """The values of `leaves`, or the error that the checkpoint was deleted meanwhile."""
    with unchanged(checkpoint.path, checkpoint.described):
        return read_leaves(checkpoint, leaves, options)


def _report(checkpoint: Checkpoint, leaves: Sequence[LeafPlan], seconds: float) -> RestoreReport:
    """The report of a restore of `leaves`."""
    changed = [leaf for leaf in leaves if leaf.record.spec != leaf.wanted]
    return RestoreReport(
        str(checkpoint.path),
        tuple(leaf.record.name for leaf in leaves),
        tuple(
            (leaf.record.name, str(leaf.record.spec), str(leaf.wanted))
            for leaf in changed
            if str(leaf.record.spec) != str(leaf.wanted)
        ),
        sum(leaf.record.array.nbytes for leaf in leaves if leaf.record.array is not None),
        seconds,
    )
