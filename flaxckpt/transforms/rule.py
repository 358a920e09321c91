"""What all transforms have in common.

A transform is a function of two dicts, from key paths to leaves: the state so far, and the target.
It returns the new state. The classes of this package are such functions, and so is any function of
the user's. They are applied in order, and only what the target needs of the result is read.

Patterns are regular expressions that must match a whole key path (`re.fullmatch`). A rule that
matches nothing is an error, unless it is `optional`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flaxckpt.errors import RuleError
from flaxckpt.leaves.lazy import LazyArray
from flaxckpt.restoring.leaf import Leaf, as_leaf

State = dict[str, Leaf]
# The leaves of the target, by key path, as they are; empty without a target.
Target = Mapping[str, Any]
Transform = Callable[[State, Target], Mapping[str, Any]]


def transformed(state: State, target: Target, transforms: Iterable[Transform]) -> State:
    """`state` after `transforms`, in order.

    Raises:
      RuleError: when one matches nothing, makes two leaves of one path, or returns no dict.
    """
    for transform in transforms:
        result = transform(dict(state), dict(target))
        if not isinstance(result, Mapping):
            raise RuleError(
                f"the transform {transform!r:.300} returned a {type(result).__name__}. It must "
                "return a dict from key paths to leaves or values."
            )
        if odd := [name for name in result if not isinstance(name, str)]:
            raise RuleError(
                f"the transform {transform!r:.300} returned {odd[0]!r} as a key path. It must "
                "return a dict from key paths, which are strings, to leaves or values."
            )
        state = {name: as_leaf(value, name) for name, value in result.items()}
    return state


def matches(
    rule: Any, pattern: str, names: Iterable[str], optional: bool
) -> dict[str, re.Match[str]]:
    """The names that `pattern` matches as a whole, with the match.

    Raises:
      RuleError: when it is no regular expression, or matches none.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise RuleError(
            f"{rule!r:.300}: {pattern!r} is no regular expression: {error}. Correct it."
        ) from None
    names = list(names)
    found = {name: match for name in names if (match := compiled.fullmatch(name))}
    if not found and not optional:
        close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
        raise RuleError(
            f"{rule!r:.300}: {pattern!r} matches no key path as a whole. The closest are "
            f"{', '.join(close) or 'none: there is nothing'}. Correct it, or pass optional=True."
        )
    return found


def expand(rule: Any, match: re.Match[str], template: str) -> str:
    """`template` with the groups of `match`.

    Raises:
      RuleError: when it names a group that there is not.
    """
    try:
        return match.expand(template)
    except (re.error, IndexError) as error:
        raise RuleError(
            f"{rule!r:.300}: {template!r} does not fit its pattern: {error}. Name a group that the "
            "pattern has."
        ) from None


def merged(rule: Any, pairs: Iterable[tuple[str, Leaf]]) -> State:
    """A state of `pairs`.

    Raises:
      RuleError: when two have one name.
    """
    state: State = {}
    for name, leaf in pairs:
        if name in state:
            raise RuleError(
                f"{rule!r:.300} makes two leaves of the key path {name}: {state[name].name} and "
                f"{leaf.name}. Drop one of them first."
            )
        state[name] = leaf
    return state


def array_of(rule: Any, leaf: Leaf) -> LazyArray:
    """The array of a leaf.

    Raises:
      RuleError: when it has none, or is a PRNG key.
    """
    if leaf.array is None or leaf.spec.kind == "prng_key":
        raise RuleError(
            f"{rule!r:.300} cannot be used for {leaf.name}, which is {leaf.spec}. Let its pattern "
            "match arrays only."
        )
    return leaf.array
