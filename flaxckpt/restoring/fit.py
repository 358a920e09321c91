"""What a restore is asked for."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict, get_args

from flax import traverse_util

from flaxckpt.errors import RuleError
from flaxckpt.leaves.conversion import DtypePolicy
from flaxckpt.source.checkpoint import Source
from flaxckpt.source.leaf import Leaf
from flaxckpt.transforms import Transform
from flaxckpt.tree.keypaths import Only, name_of, parse_name, selector, subtree_of
from flaxckpt.tree.node import Node, named_nodes

# How a checkpoint is to be fitted to a target: the arguments that every restore takes.


Missing = Literal["error", "init"]
Unexpected = Literal["error", "ignore"]
OptimizerPolicy = Literal["match", "reset"]


class FitArguments(TypedDict, total=False):
    """The same, as keyword arguments; see `flaxckpt.restore`."""

    as_numpy: bool
    only: Only | None
    transforms: Sequence[Transform]
    missing: Missing | Mapping[str, Missing]
    unexpected: Unexpected | Mapping[str, Unexpected]
    dtype: DtypePolicy
    opt_state: OptimizerPolicy


@dataclasses.dataclass(frozen=True)
class Fit:
    """How a checkpoint is fitted to a target. The fields are the arguments of `flaxckpt.restore`.

    Raises:
      ValueError: when one is none of the values that it may have.
      RuleError: when a pattern is no regular expression.
    """

    as_numpy: bool = False
    only: Only | None = None
    transforms: Sequence[Transform] = ()
    missing: Missing | Mapping[str, Missing] = "error"
    unexpected: Unexpected | Mapping[str, Unexpected] = "error"
    dtype: DtypePolicy = "error"
    opt_state: OptimizerPolicy = "match"

    def __post_init__(self) -> None:
        """Refuses other values."""
        _check("missing", self.missing, get_args(Missing))
        _check("unexpected", self.unexpected, get_args(Unexpected))
        _check("dtype", self.dtype, get_args(DtypePolicy))
        _check("opt_state", self.opt_state, get_args(OptimizerPolicy))

    @property
    def is_lossy(self) -> bool:
        """Whether numbers may lose what the wanted dtype cannot hold."""
        return self.dtype == "cast"

    def initialises(self, name: str) -> bool:
        """Whether the leaf `name` of the target may be one that the checkpoint lacks."""
        return _policy(self.missing, name) == "init"

    def ignores(self, name: str) -> bool:
        """Whether the leaf `name` of the checkpoint may be one that the target lacks."""
        return _policy(self.unexpected, name) == "ignore"

    def check_patterns(self, saved: Sequence[str], target: Sequence[str]) -> None:
        """Refuses patterns that match no leaf of the side that they are about.

        Raises:
          RuleError: in that case.
        """
        for title, policy, names in (
            ("missing", self.missing, target),
            ("unexpected", self.unexpected, saved),
        ):
            for pattern in () if isinstance(policy, str) else policy:
                if not any(re.fullmatch(pattern, name) for name in names):
                    raise RuleError(
                        f"{title}={{{pattern!r}: ...}} matches no key path. Correct it."
                    )


def _check(title: str, value: object, allowed: Sequence[str]) -> None:
    """Refuses what is none of `allowed`, nor a dict of patterns to them."""
    if isinstance(value, Mapping):
        for pattern in value:
            _check_pattern(title, pattern)
    values = value.values() if isinstance(value, Mapping) else [value]
    if any(item not in allowed for item in values):
        raise ValueError(f"{title}={value!r} must be {' or '.join(allowed)}")


def _check_pattern(title: str, pattern: str) -> None:
    """Refuses what is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise RuleError(
            f"{title}={{{pattern!r}: ...}} is no regular expression: {error}. Correct it."
        ) from None


def _policy(policy: str | Mapping[str, str], name: str) -> str:
    """What holds for `name`: what the first pattern that matches says; otherwise an error."""
    if isinstance(policy, str):
        return policy
    return next((value for key, value in policy.items() if re.fullmatch(key, name)), "error")


# What of a source is wanted, before it is fitted to a target. No I/O.


class Saved(NamedTuple):
    """The wanted part of a source.

    Attributes:
      leaves: by key path; that of a subtree begins at its root.
      nodes: the structure around them.
      is_whole: whether the structure has these leaves and no others.
    """

    leaves: Mapping[str, Leaf]
    nodes: Sequence[Node | None]
    is_whole: bool


def select(source: Source, only: Only | None) -> Saved:
    """The part of `source` that `only` selects.

    Raises:
      RuleError: when that is nothing.
    """
    if only is None:
        return Saved({leaf.name: leaf for leaf in source.leaves}, source.nodes, is_whole=True)
    root = subtree_of(only)
    if root is not None:
        return _subtree(source, root)
    wanted = selector(only)
    leaves = {leaf.name: leaf for leaf in source.leaves if wanted(leaf.name)}
    if not leaves:
        raise _nothing(source, only)
    return Saved(leaves, source.nodes, is_whole=False)


def _subtree(source: Source, root: str) -> Saved:
    """The node at `root` and all below it, as a tree of its own."""
    root = root.strip("/")
    begin = next((i for i, (name, _) in enumerate(named_nodes(source.nodes)) if name == root), None)
    if begin is None:
        raise _nothing(source, root)
    nodes = source.nodes[begin : _end(source.nodes, begin)]
    skipped = sum(node is None for node in source.nodes[:begin])
    found = source.leaves[skipped : skipped + sum(node is None for node in nodes)]
    cut = len(root) + 1 if root else 0
    leaves = {leaf.name[cut:]: leaf.renamed(leaf.name[cut:]) for leaf in found}
    for name, leaf in leaves.items():
        leaf.origin = name
    return Saved(leaves, nodes, is_whole=True)


def _end(nodes: Sequence[Node | None], begin: int) -> int:
    """Where the tree that begins at `begin` of a preorder ends."""
    open_nodes, end = 1, begin
    while open_nodes:
        node = nodes[end]
        open_nodes += -1 if node is None else len(node.keys) - 1
        end += 1
    return end


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


def nested(values: Mapping[str, Any]) -> Any:
    """`values`, by key path, as dicts within dicts.

    Raises:
      RuleError: when a path leads through another one's value.

    Example:
      >>> nested({"params/kernel": 1, "step": 2})
      {'params': {'kernel': 1}, 'step': 2}
    """
    paths = {parse_name(name): value for name, value in values.items()}
    for path in paths:
        if any(path[:length] in paths for length in range(len(path))):
            name = name_of(path)
            raise RuleError(f"{name} lies below another leaf. Rename or drop one of the two.")
    return paths[()] if () in paths else traverse_util.unflatten_dict(paths)
