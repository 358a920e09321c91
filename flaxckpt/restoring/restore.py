"""Restoring one checkpoint, with a target or without."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

import jax

from flaxckpt import garbage_collector
from flaxckpt.arguments import checked
from flaxckpt.errors import RuleError
from flaxckpt.formats.opening import open_source
from flaxckpt.leaves.spec import LeafInfo
from flaxckpt.options import Options
from flaxckpt.restoring.read_leaves import read_leaves
from flaxckpt.restoring.restore_plan import (
    RestoreArguments,
    as_abstract,
    lists_restore_arguments,
    rebuilt,
    restore_arguments,
    with_target,
    without_target,
)
from flaxckpt.restoring.restore_report import RestoreReport, report_of
from flaxckpt.source.checkpoint import Source
from flaxckpt.tree import nnx_objects
from flaxckpt.tree.structure import flatten

if TYPE_CHECKING:
    from etils import epath


T = TypeVar("T")
# Makes the leaves of the target at some positions, in the order of `jax.tree.leaves`.
Initialise = Callable[[Sequence[int]], Sequence[Any]]


@overload
def restore(
    path: epath.PathLike,
    target: None = None,
    *,
    options: Options = Options(),
    **how: Unpack[RestoreArguments],
) -> Any: ...
@overload
def restore(
    path: epath.PathLike,
    target: T,
    *,
    options: Options = Options(),
    **how: Unpack[RestoreArguments],
) -> T: ...
@checked(options=Options)
@lists_restore_arguments
def restore(
    path: epath.PathLike,
    target: Any = None,
    *,
    options: Options = Options(),
    **how: Unpack[RestoreArguments],
) -> Any:
    """Restores the checkpoint at `path`, of flaxckpt or of any format that it reads.

    Leaves are matched by their key paths, whatever the containers. Leaves whose key paths differ
    match only if nothing else could: `0` and `'0'`, boxed and unboxed values, the state of an
    optimizer that has moved within its chain.

    Args:
      path: a directory, a file, or its URL; a step of a run is one too. `docs/formats.md` lists
        the formats.
      target: a tree like the one that was saved, concrete or abstract (`abstract_state`,
        `jax.eval_shape`). The result has its containers, leaf types and shardings. Without a
        target the saved containers are rebuilt (see `register_node`); what was a `jax.Array` is
        one on the default device.
      as_numpy: without a target, whether jax arrays come back as numpy arrays. (PRNG keys have no
        numpy form and stay jax arrays.)
      only: which part is wanted; no byte of the rest is read. The key path of a node (`"params"`)
        selects that subtree, and the target is like the subtree. A regular expression that must
        match a whole key path (`"params/.*/kernel"`), a list of patterns (key paths of nodes, or
        regular expressions), or a function of the key path selects leaves: the other leaves of a
        target stay as they are, and without a target the result is a dict of dicts.
      transforms: what is changed on the way: `Rename`, `Drop`, `Apply`, `Stack`, `Unstack`, `Cast`,
        `Fallback`, or functions of two dicts, from key paths to leaves: the saved ones, and the
        target's.
      missing: what happens to a leaf that the checkpoint lacks: an `error`, or `init`: it keeps the
        value of the target. Or a dict from patterns, as in `only`, to these.
      unexpected: what happens to a leaf that the target lacks: an `error`, or `ignore`. Or a dict
        from patterns to these.
      dtype: what happens where the dtype of the target is not the saved one: an `error`; `widen`
        converts floats to wider floats, and `cast` converts any dtype, both to the target's;
        `saved` gives the leaf the dtype that it has in the checkpoint.
      opt_state: how optimizer state is restored: `match`, or `reset`, which keeps the target's.
      options: how to read.

    Raises:
      CheckpointNotFoundError: when there is no checkpoint at `path`.
      StructureMismatchError: when it does not fit the target; every leaf that differs is listed.
      RuleError: when `only`, a transform or a pattern fits nothing.
      CorruptCheckpointError: when bytes are missing or do not match their checksum.

    Example:
      >>> flaxckpt.save(tmp_path / "exported", {"params": {"w": 1.5}, "step": 7})
      >>> flaxckpt.restore(tmp_path / "exported")
      {'params': {'w': 1.5}, 'step': 7}
      >>> flaxckpt.restore(tmp_path / "exported", only="params")
      {'w': 1.5}
    """
    arguments = restore_arguments(**how)
    return restore_tree(open_source(path, options), target, arguments, options)[0]


@garbage_collector.paused()
def restore_tree(
    source: Source,
    target: Any,
    how: RestoreArguments,
    options: Options,
    initialise: Initialise | None = None,
) -> tuple[Any, RestoreReport]:
    """As `restore`, from what is open already, and with a report.

    Args:
      source: what is restored from.
      target: as for `restore`.
      how: all arguments, as `restore_arguments` gives them.
      options: how to read.
      initialise: makes the leaves that the checkpoint lacks; by default the target has them.
    """
    start = time.monotonic()
    if target is None:
        plan = without_target(source, how)
        with source.unchanged():
            tree = rebuilt(plan, read_leaves(source, plan.leaves, options))
        return tree, report_of(source, plan, time.monotonic() - start)
    stateful, graphs = nnx_objects.split(target)
    flat = flatten(stateful)
    plan = with_target(source, flat, how)
    fresh = set(plan.initialised)
    positions = [i for i, name in enumerate(flat.names) if name in fresh]
    if initialise is None:
        _check_concrete([(flat.names[i], flat.leaves[i]) for i in positions])
    with source.unchanged():
        values = read_leaves(source, plan.leaves, options)
    leaves = dict(zip(flat.names, flat.leaves, strict=True))
    leaves.update((leaf.name, value) for leaf, value in zip(plan.leaves, values, strict=True))
    if positions and initialise is not None:
        names = (flat.names[i] for i in positions)
        leaves.update(zip(names, initialise(positions), strict=True))
    tree = jax.tree.unflatten(jax.tree.structure(stateful), leaves.values())
    tree = nnx_objects.merge(tree, graphs)
    return tree, report_of(source, plan, time.monotonic() - start)


def _check_concrete(leaves: Sequence[tuple[str, Any]]) -> None:
    """Refuses to keep the values of leaves that have none.

    Raises:
      RuleError: in that case; all of them are named.
    """
    kinds = (jax.ShapeDtypeStruct, LeafInfo)
    abstract = [name for name, leaf in leaves if isinstance(as_abstract(leaf), kinds)]
    if abstract:
        raise RuleError(
            f"the checkpoint has no value for {', '.join(abstract)}, and the target is abstract "
            "there. Give a concrete target, or use CheckpointManager.restore_or_init."
        )
