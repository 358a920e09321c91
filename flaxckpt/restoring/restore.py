"""Restoring one checkpoint, with a target or without."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from flaxckpt import garbage_collector
from flaxckpt.errors import RuleError
from flaxckpt.formats.opening import open_source
from flaxckpt.leaves.conversion import DtypePolicy
from flaxckpt.options import Options
from flaxckpt.restoring.fit import Fit, Missing, OptimizerPolicy, Unexpected
from flaxckpt.restoring.restore_plan import LeafPlan, Plan, rebuilt, with_target, without_target
from flaxckpt.restoring.restore_report import RestoreReport, report_of
from flaxckpt.restoring.values import read_leaves
from flaxckpt.source.checkpoint import Source
from flaxckpt.store.store import PathLike
from flaxckpt.transforms import Transform
from flaxckpt.tree import nnx_objects
from flaxckpt.tree.keypaths import Only
from flaxckpt.tree.structure import Flat, flatten

# Restoring one checkpoint, with a target or without.


# Makes the leaves of the target at some positions, in the order of `jax.tree.leaves`.
Initialise = Callable[[Sequence[int]], Sequence[Any]]


def restore(
    path: PathLike,
    target: Any = None,
    *,
    as_numpy: bool = False,
    only: Only | None = None,
    transforms: Sequence[Transform] = (),
    missing: Missing | Mapping[str, Missing] = "error",
    unexpected: Unexpected | Mapping[str, Unexpected] = "error",
    dtype: DtypePolicy = "error",
    opt_state: OptimizerPolicy = "match",
    options: Options = Options(),
) -> Any:
    """Restores the checkpoint at `path`, of flaxckpt or of any format that it reads.

    Leaves are matched by their key paths, whatever the containers. What is called otherwise is
    only taken for the same where nothing else can be meant: `0` and `'0'`, boxed and unboxed, the
    state of an optimizer that has moved within its chain.

    Args:
      path: a directory, a file, or its URL; a step of a run is one too. `docs/formats.md` lists
        the formats.
      target: a tree like the one that was saved, concrete or abstract (`abstract_state`,
        `jax.eval_shape`). The result has its containers, leaf types and shardings. Without a
        target the saved containers are rebuilt (see `register_node`); what was a `jax.Array` is
        one on the default device.
      as_numpy: without a target, whether jax arrays come back as numpy arrays. (PRNG keys have no
        numpy form and stay jax arrays.)
      only: which part is wanted; no byte of the rest is read. The path of a node (`"params"`): that
        subtree, and the target is one like it. A glob over key paths (`"params/**/kernel"`), a
        list of paths and globs, or a function of the path: these leaves; what else a target has is
        left as it is, and without a target the result is a dict of dicts.
      transforms: what is changed on the way: `Rename`, `Drop`, `Apply`, `Stack`, `Unstack`, `Cast`,
        `Fallback`, or functions of two dicts, from key paths to leaves: the saved ones, and the
        target's.
      missing: what happens to a leaf that the checkpoint lacks: an `error`, or `init`: it keeps the
        value of the target. Or a dict from patterns (`re.fullmatch`) to these.
      unexpected: what happens to a leaf that the target lacks: an `error`, or `ignore`. Or a dict
        from patterns to these.
      dtype: whether dtypes may change: `error` never, `widen` floats to wider floats, `cast` any.
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
    fit = Fit(as_numpy, only, transforms, missing, unexpected, dtype, opt_state)
    return restore_tree(open_source(path, options), target, fit, options)[0]


@garbage_collector.paused()
def restore_tree(
    source: Source,
    target: Any,
    fit: Fit,
    options: Options,
    initialise: Initialise | None = None,
) -> tuple[Any, RestoreReport]:
    """As `restore`, from what is open already, and with a report.

    What the checkpoint lacks is made by `initialise`; without it the target has it.
    """
    start = time.monotonic()
    if target is None:
        plan, nodes = without_target(source, fit)
        tree = rebuilt(plan, nodes, _read(source, plan.leaves, options))
    else:
        stateful, graphs = nnx_objects.split(target)
        flat = flatten(stateful)
        plan = with_target(source, flat, fit)
        leaves = _leaves(source, flat, plan, options, initialise)
        tree = jax.tree.unflatten(jax.tree.structure(stateful), leaves)
        tree = nnx_objects.merge(tree, graphs)
    return tree, report_of(source, plan, time.monotonic() - start)


def _leaves(
    source: Source, target: Flat, plan: Plan, options: Options, initialise: Initialise | None
) -> list[Any]:
    """The leaves of the result, in the target's order."""
    fresh = set(plan.initialised)
    positions = [i for i, name in enumerate(target.names) if name in fresh]
    if positions and initialise is None:
        _check_concrete([(target.names[i], target.leaves[i]) for i in positions])
    values = _read(source, plan.leaves, options)
    restored = {leaf.name: value for leaf, value in zip(plan.leaves, values, strict=True)}
    if positions and initialise is not None:
        names = (target.names[i] for i in positions)
        restored.update(zip(names, initialise(positions), strict=True))
    return [
        restored.get(name, leaf) for name, leaf in zip(target.names, target.leaves, strict=True)
    ]


def _check_concrete(leaves: Sequence[tuple[str, Any]]) -> None:
    """Refuses to keep the values of leaves that have none.

    Raises:
      RuleError: in that case; all of them are named.
    """
    abstract = [name for name, leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
    if abstract:
        raise RuleError(
            f"the checkpoint has no value for {', '.join(abstract)}, and the target is abstract "
            "there. Give a concrete target, or use CheckpointManager.restore_or_init."
        )


def _read(source: Source, leaves: Sequence[LeafPlan], options: Options) -> list[Any]:
    """The values of `leaves`, or the error that the checkpoint was deleted meanwhile."""
    with source.unchanged():
        return read_leaves(source, leaves, options)
