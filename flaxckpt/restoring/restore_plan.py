"""The plan of a restore: its arguments, the part that is wanted, and what each leaf becomes."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple, ParamSpec, TypedDict, TypeVar, Unpack, get_args

import jax
import numpy as np
from flax import traverse_util

from flaxckpt.errors import Mismatch, RuleError, ShardingError, StructureMismatchError
from flaxckpt.leaves import conversion, kinds
from flaxckpt.leaves.conversion import DtypePolicy
from flaxckpt.leaves.dtypes import parse_dtype
from flaxckpt.leaves.spec import LeafInfo, LeafSpec
from flaxckpt.restoring import placement
from flaxckpt.restoring.advice import advice_for
from flaxckpt.restoring.placement import ReplicaRead
from flaxckpt.source.checkpoint import Source
from flaxckpt.source.leaf import Leaf
from flaxckpt.transforms import Transform, transformed
from flaxckpt.tree.keypaths import Only, first_match, name_of, parse_name, selected
from flaxckpt.tree.match import Allowed, SavedSide, TargetSide, match
from flaxckpt.tree.node import Node, named_nodes
from flaxckpt.tree.rebuild import build
from flaxckpt.tree.structure import Flat

P = ParamSpec("P")
R = TypeVar("R")
_ABSENT = object()

# The arguments that every restore takes. They are declared here, and nowhere else.

Missing = Literal["error", "init"]
Unexpected = Literal["error", "ignore"]
OptimizerPolicy = Literal["match", "reset"]


class RestoreArguments(TypedDict, total=False):
    """How a checkpoint becomes a tree; `flaxckpt.restore` describes each argument."""

    as_numpy: bool
    only: Only | None
    transforms: Sequence[Transform]
    missing: Missing | Mapping[str, Missing]
    unexpected: Unexpected | Mapping[str, Unexpected]
    dtype: DtypePolicy
    opt_state: OptimizerPolicy


_DEFAULTS: RestoreArguments = {
    "as_numpy": False,
    "only": None,
    "transforms": (),
    "missing": "error",
    "unexpected": "error",
    "dtype": "error",
    "opt_state": "match",
}
_CHOICES: Mapping[str, Sequence[str]] = {
    "missing": get_args(Missing),
    "unexpected": get_args(Unexpected),
    "dtype": get_args(DtypePolicy),
    "opt_state": get_args(OptimizerPolicy),
}


def restore_arguments(**how: Unpack[RestoreArguments]) -> RestoreArguments:
    """All arguments of a restore: those in `how`, and the defaults of the others.

    Raises:
      ValueError: when one has a value that it may not have.
    """
    for name, value in how.items():
        allowed = _CHOICES.get(name)
        values = value.values() if isinstance(value, Mapping) else [value]
        if allowed is not None and any(item not in allowed for item in values):
            raise ValueError(f"{name}={value!r} must be {' or '.join(allowed)}")
    return {**_DEFAULTS, **how}


def lists_restore_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Lists the arguments of `RestoreArguments` in the signature that `help(function)` shows."""
    signature = inspect.signature(function)
    given = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    listed = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=value,
            annotation=RestoreArguments.__annotations__[name].__forward_arg__,
        )
        for name, value in _DEFAULTS.items()
    ]
    replaced = signature.replace(parameters=[*given, *listed])
    function.__signature__ = replaced  # type: ignore[attr-defined]
    return function


# The part of a source that is wanted, before it is matched with a target.


class Saved(NamedTuple):
    """The wanted part of a source.

    Attributes:
      leaves: by key path; that of a subtree begins at its root.
      nodes: the structure around them.
      is_tree: whether it is a tree, all of it or a subtree; otherwise some leaves of one.
    """

    leaves: Mapping[str, Leaf]
    nodes: Sequence[Node | None]
    is_tree: bool


def select(source: Source, only: Only | None, target: Iterable[str] = ()) -> Saved:
    """The part of `source` that `only` selects.

    The names of the leaves of the target tell which patterns are paths of nodes of it.

    Raises:
      RuleError: when `only` selects nothing.
    """
    if only is None:
        return Saved({leaf.name: leaf for leaf in source.leaves}, source.nodes, is_tree=True)
    if isinstance(only, str) and (subtree := _subtree(source, only.strip("/"))) is not None:
        return subtree
    names = [leaf.name for leaf in source.leaves]
    wanted = selected(only, {*names, *target}, f"only={only!r}")
    leaves = {leaf.name: leaf for leaf in source.leaves if leaf.name in wanted}
    if not leaves:
        raise _nothing(source, only)
    return Saved(leaves, source.nodes, is_tree=False)


def _subtree(source: Source, root: str) -> Saved | None:
    """The node at `root` and all below it, as a tree of its own; `None` without such a node."""
    begin = next((i for i, (name, _) in enumerate(named_nodes(source.nodes)) if name == root), None)
    if begin is None:
        return None
    open_nodes, end = 1, begin
    while open_nodes:
        node = source.nodes[end]
        open_nodes += -1 if node is None else len(node.keys) - 1
        end += 1
    nodes = source.nodes[begin:end]
    skipped = sum(node is None for node in source.nodes[:begin])
    found = source.leaves[skipped : skipped + sum(node is None for node in nodes)]
    cut = len(root) + 1 if root else 0
    leaves = {leaf.name[cut:]: leaf.renamed(leaf.name[cut:]) for leaf in found}
    for name, leaf in leaves.items():
        leaf.origin = name
    return Saved(leaves, nodes, is_tree=True)


def _nothing(source: Source, only: Only) -> RuleError:
    """The error of a selection that selects nothing."""
    names = [name for name, _ in named_nodes(source.nodes) if name]
    wanted = only if isinstance(only, str) else ""
    close = difflib.get_close_matches(wanted, names, n=3, cutoff=0.5)
    top = list(dict.fromkeys(name.partition("/")[0] for name in names))[:10]
    return RuleError(
        f"only={only!r} selects nothing of the checkpoint at {source.path}. It has "
        f"{', '.join(close or top) or 'no leaves'}. Correct the path."
    )


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
    replica: ReplicaRead | None = None


class Plan(NamedTuple):
    """A restore.

    Attributes:
      leaves: those that are restored.
      initialised: the names of the leaves of the target that get a value from elsewhere.
      ignored: the names of the saved leaves that are left out, because that is allowed.
      saved_as: the name in the checkpoint of each restored leaf that has another one there.
      own_types: the target's types of the leaves that get the checkpoint's dtypes instead.
      nodes: the saved structure over the leaves, where there is no target and it is known.
    """

    leaves: Sequence[LeafPlan]
    initialised: Sequence[str] = ()
    ignored: Sequence[str] = ()
    saved_as: Mapping[str, str] = {}
    own_types: Mapping[str, str] = {}
    nodes: Sequence[Node | None] | None = None


def without_target(source: Source, how: RestoreArguments) -> Plan:
    """Every leaf as it was saved.

    Raises:
      StructureMismatchError: when jax cannot hold a saved dtype now, and no cast was asked for.
      RuleError: when `only` or a transform selects nothing.
    """
    saved = select(source, how["only"])
    leaves = transformed(dict(saved.leaves), {}, how["transforms"])
    is_lossy = how["dtype"] == "cast"
    plans, mismatches = [], []
    for name, leaf in leaves.items():
        wanted = leaf.spec
        if how["as_numpy"] and wanted.kind == "jax":
            wanted = LeafSpec("numpy", wanted.dtype, wanted.shape)
        held = conversion.canonical(wanted)
        if held.dtype != wanted.dtype and not is_lossy:
            note = "(jax_enable_x64 is off)"
            mismatches.append(Mismatch("dtype", name, str(wanted), str(held), note))
        plans.append(LeafPlan(name, leaf, held, lossy=is_lossy))
    advice = 'Set jax_enable_x64, pass as_numpy=True, or allow the loss with dtype="cast".'
    raise_any(source, mismatches, len(plans), advice)
    is_same = saved.is_tree and not how["transforms"]
    return Plan(plans, nodes=saved.nodes if is_same else None)


def rebuilt(plan: Plan, values: Sequence[Any]) -> Any:
    """The tree over `values`: with the saved containers where they are known, else dicts.

    Raises:
      RuleError: when a key path leads through another leaf.
    """
    if plan.nodes is not None:
        return build(plan.nodes, values)
    leaves = zip(plan.leaves, values, strict=True)
    paths = {parse_name(leaf.name): value for leaf, value in leaves}
    for path in paths:
        if any(path[:length] in paths for length in range(len(path))):
            raise RuleError(
                f"{name_of(path)} lies below another leaf. Rename or drop one of the two."
            )
    return paths[()] if () in paths else traverse_util.unflatten_dict(paths)


def with_target(source: Source, target: Flat, how: RestoreArguments) -> Plan:
    """Every leaf of the target, with the saved leaf that belongs to it.

    Raises:
      StructureMismatchError: when the two do not fit.
      RuleError: when `only`, a transform or a pattern fits nothing.
    """
    there = dict(zip(target.names, target.leaves, strict=True))
    saved = select(source, how["only"], there)
    leaves = transformed(dict(saved.leaves), there, how["transforms"])
    wanted = {
        name: as_abstract(leaf) for name, leaf in _wanted(there, saved, leaves, how["only"]).items()
    }
    specs = {name: kinds.describe(leaf, name)[0] for name, leaf in wanted.items()}
    allowed = Allowed(
        _names_with("missing", how["missing"], "init", specs),
        _names_with("unexpected", how["unexpected"], "ignore", leaves),
        {name for name in specs if (leaf := leaves.get(name)) is not None and leaf.is_initial},
        how["opt_state"] == "reset",
    )
    displaced = {name for name, leaf in leaves.items() if leaf.origin != name}

    def problem(spec: LeafSpec, wanted: LeafSpec) -> str:
        given = conversion.restored_as(spec, wanted, how["dtype"])
        why = conversion.problem(spec, given, how["dtype"])
        return why or ("dtype" if conversion.canonical(given).dtype != given.dtype else "")

    found = match(
        SavedSide(saved.nodes, leaves, displaced), TargetSide(target.nodes, specs), problem, allowed
    )
    if found.mismatches:
        advice = advice_for(found.mismatches, found.in_optimizer)
        total = len(leaves) + len(specs) - len(found.saved)
        raise_any(source, found.mismatches, total, advice)
    plans: list[LeafPlan] = []
    saved_as: dict[str, str] = {}
    own_types: dict[str, str] = {}
    for name, partner in found.saved.items():
        leaf, spec = leaves[partner], specs[name]
        given = conversion.restored_as(leaf.spec, spec, how["dtype"])
        if given != spec:
            own_types[name] = str(spec)
        where = _sharding(name, wanted[name])
        plans.append(LeafPlan(name, leaf, given, where, how["dtype"] == "cast"))
        if leaf.origin is not None and leaf.origin != name:
            saved_as[name] = leaf.origin
    return Plan(plans, found.initialised, found.ignored, saved_as, own_types)


def _wanted(
    target: Mapping[str, Any], saved: Saved, leaves: Mapping[str, Leaf], only: Only | None
) -> Mapping[str, Any]:
    """The leaves of the target that are to be restored.

    With patterns these are the leaves that they select, and those that the transforms made of them.
    """
    if only is None or saved.is_tree:
        return target
    chosen = selected(only, {*saved.leaves, *target}, f"only={only!r}")
    return {n: leaf for n, leaf in target.items() if n in chosen or n in leaves}


def as_abstract(leaf: Any) -> Any:
    """A leaf of a target; what has a shape, a dtype and a sharding is an abstract array."""
    if isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct | LeafInfo):
        return leaf
    dtype, sharding = getattr(leaf, "dtype", None), getattr(leaf, "sharding", _ABSENT)
    if dtype is None or sharding is _ABSENT or not hasattr(leaf, "shape"):
        return leaf
    dtype = parse_dtype(dtype) if isinstance(dtype, str) else dtype
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)


def _names_with(
    title: str, policy: str | Mapping[str, str], value: str, names: Collection[str]
) -> Set[str]:
    """The leaves for which the argument `title` says `value`.

    Raises:
      RuleError: when a pattern is not a valid regular expression, or selects nothing.
    """
    if isinstance(policy, str):
        return set(names) if policy == value else set()
    found = first_match(policy, names, title, optional=False)
    return {name for name, said in found.items() if said == value}


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
