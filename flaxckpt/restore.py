"""Restoring one checkpoint, with a target or without."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from flaxckpt import placement
from flaxckpt.checkpoint import Checkpoint, open_checkpoint, unchanged
from flaxckpt.errors import Mismatch
from flaxckpt.leaves import convert, handler
from flaxckpt.leaves.convert import DtypePolicy
from flaxckpt.leaves.dtypes import parse_dtype
from flaxckpt.leaves.record import DEVICE_KINDS, SCALAR_KINDS
from flaxckpt.options import Options
from flaxckpt.planning import LeafPlan, raise_any, with_target, without_target
from flaxckpt.reading import ArrayRead, Parts, read_arrays
from flaxckpt.sharding.chunks import whole
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
    path: epath.PathLike,
    target: Any = None,
    *,
    as_numpy: bool = False,
    dtype: DtypePolicy = "error",
    options: Options = Options(),
) -> Any:
    """Restores the checkpoint at `path`.

    Args:
      path: the directory of one checkpoint; a step of a run is one too.
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
    checkpoint = open_checkpoint(path)
    return restore_tree(checkpoint, target, as_numpy=as_numpy, dtype=dtype, options=options)[0]


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
    if target is None:
        leaves = without_target(checkpoint, as_numpy, dtype)
        tree = build(checkpoint.tree.nodes, _read(checkpoint, leaves, options))
    else:
        stateful, graphs = nnx_objects.split(target)
        leaves = with_target(checkpoint, flatten(stateful), dtype)
        values = _read(checkpoint, leaves, options)
        tree = jax.tree.unflatten(jax.tree.structure(stateful), values)
        tree = nnx_objects.merge(tree, graphs)
    return tree, _report(checkpoint, leaves, time.monotonic() - start)


def _read(checkpoint: Checkpoint, leaves: Sequence[LeafPlan], options: Options) -> list[Any]:
    """The values of `leaves`, or the error that the checkpoint was deleted meanwhile."""
    with unchanged(checkpoint.path, checkpoint.described):
        return _read_leaves(checkpoint, leaves, options)


def _read_leaves(checkpoint: Checkpoint, leaves: Sequence[LeafPlan], options: Options) -> list[Any]:
    """The values of `leaves`."""
    reads = [_array_read(leaf) for leaf in leaves if leaf.record.array is not None]
    parts = read_arrays(checkpoint, reads, options.buffer_bytes)
    values, mismatches = [], []
    for leaf in leaves:
        array = leaf.record.array
        found = None if array is None else (next(parts), array.shape)
        try:
            values.append(_from_json(leaf) if found is None else _from_parts(leaf, *found))
        except OverflowError as error:
            saved, wanted = str(leaf.record.spec), str(leaf.wanted)
            mismatches.append(Mismatch("dtype", leaf.record.name, saved, wanted, f"({error})"))
    raise_any(checkpoint, mismatches, len(leaves), "Give the target a wider dtype.")
    return values


def _array_read(leaf: LeafPlan) -> ArrayRead:
    """What has to be read for a leaf that has an array."""
    array = leaf.record.array
    assert array is not None
    if leaf.wanted.kind not in DEVICE_KINDS:
        return ArrayRead(leaf.record.name, array, [whole(array.shape)])
    return ArrayRead(leaf.record.name, array, placement.regions_of(leaf.where, array.shape))


def _from_parts(leaf: LeafPlan, parts: Parts, shape: tuple[int, ...]) -> Any:
    """The leaf around the parts of its array, which has `shape`.

    Raises:
      OverflowError: when it is a Python number that the wanted dtype cannot hold.
    """
    wanted = leaf.wanted
    if leaf.record.spec.kind in SCALAR_KINDS and wanted.dtype and not leaf.lossy:
        convert.check_range(next(iter(parts.values())), parse_dtype(wanted.dtype))
    if wanted.kind in DEVICE_KINDS:
        stored: Any = placement.to_devices(parts, shape, wanted, leaf.where)
    else:
        stored = placement.to_host(parts, wanted)
    return handler.decode(wanted, stored, leaf.record.name)


def _from_json(leaf: LeafPlan) -> Any:
    """The leaf of a record that has no array; a number may be wanted as an array."""
    saved, wanted = leaf.record.spec, leaf.wanted
    value = handler.decode(saved, leaf.record.value, leaf.record.name)
    if saved.kind not in SCALAR_KINDS or wanted.kind in SCALAR_KINDS:
        return value
    if saved.kind == "int":
        raise OverflowError(f"{value} has more than 64 bits")
    return _from_parts(leaf, {whole(()): np.asarray(value)}, ())


def _report(checkpoint: Checkpoint, leaves: Sequence[LeafPlan], seconds: float) -> RestoreReport:
    """The report of a restore of `leaves`."""
    return RestoreReport(
        str(checkpoint.path),
        tuple(leaf.record.name for leaf in leaves),
        tuple(
            (leaf.record.name, str(leaf.record.spec), str(leaf.wanted))
            for leaf in leaves
            if str(leaf.record.spec) != str(leaf.wanted)
        ),
        sum(leaf.record.array.nbytes for leaf in leaves if leaf.record.array is not None),
        seconds,
    )
