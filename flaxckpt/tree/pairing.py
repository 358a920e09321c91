"""Which saved leaf belongs to which leaf of a target, when they are not called the same.

A leaf is the saved leaf of its name. Only what is left over is looked for elsewhere, in this
order, and only where there is exactly one candidate:

1. the same state of an optimizer at another position of its chain: the same class, the same path
   within it, and the same optimizer (`opt_state/0/mu/w` and `opt_state/1/0/mu/w`);
2. the same path in another spelling: `'0'` for `0`, boxed for unboxed, `a.b` for `a/b`;
3. NamedTuples by index.

What lies in two states of different classes is never one leaf, whatever its name.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from flaxckpt.tree.keypaths import parse_name
from flaxckpt.tree.optimizers import State

# The last keys of boxes, in trees that other libraries have saved.
_BOXES = frozenset({"value", "raw_value"})


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a leaf is.

    Attributes:
      spelling: its keys, in the one spelling that all have.
      positions: the same, with the fields of NamedTuples as indices.
      state: the state of an optimizer that it is in, if it is in one.
    """

    spelling: str
    positions: str
    state: State | None = None


class Pairs(NamedTuple):
    """What belongs together.

    Attributes:
      saved: for each leaf of the target that has one, the saved leaf.
      candidates: for each leaf of the target that may be several saved ones, these.
    """

    saved: dict[str, str]
    candidates: dict[str, Sequence[str]]


def place_of(name: str) -> Place:
    """The place of a leaf of which only the name is known."""
    spelled = spelling(parse_name(name))
    return Place(spelled, spelled)


def spelling(keys: Sequence[Any]) -> str:
    """Keys in the spelling that all trees have in common.

    Example:
      >>> spelling(("layers", 0, "a.b", "value")) == spelling(("layers", "0", "a", "b"))
      True
    """
    parts = ".".join(map(str, keys)).split(".")
    while len(parts) > 1 and parts[-1] in _BOXES:
        parts.pop()
    return ".".join(parts)


def pair(saved: Mapping[str, Place], target: Mapping[str, Place]) -> Pairs:
    """Finds the saved leaf of each leaf of a target; none belongs to two.

    Args:
      saved: the places of the saved leaves, by name.
      target: the same of the target's leaves.

    Example:
      >>> pair({"a/0": place_of("a/0")}, {"a/%30": place_of("a/%30")}).saved
      {'a/%30': 'a/0'}
    """
    pairs = Pairs({n: n for n, p in target.items() if n in saved and _agree(saved[n], p)}, {})
    _pair_moved(saved, target, pairs)
    for spelled in (lambda place: place.spelling, lambda place: place.positions):
        _pair_unique(saved, target, pairs, spelled)
    return pairs


def _agree(a: Place, b: Place) -> bool:
    """Whether two places are not in states of different classes."""
    if a.state is None or b.state is None:
        return True
    if a.state.class_name and b.state.class_name:
        return a.state.class_name == b.state.class_name
    return a.state.fields == b.state.fields


def _pair_moved(saved: Mapping[str, Place], target: Mapping[str, Place], pairs: Pairs) -> None:
    """Pairs the leaves of states that have moved within their optimizer."""
    by_class = all(
        any(p.state and p.state.class_name for p in places.values()) for places in (saved, target)
    )

    def signature(place: Place) -> Any:
        state = place.state
        if state is None:
            return None
        return state.root, state.class_name if by_class else state.fields, state.inner

    ours, used = _grouped(saved, signature), set(pairs.saved.values())
    for key, names in _grouped(target, signature).items():
        left = [name for name in names if name not in pairs.saved]
        candidates = [name for name in ours.get(key, ()) if name not in used]
        if left and candidates:
            if len(names) == len(ours[key]) == 1:
                pairs.saved[left[0]] = candidates[0]
            else:
                pairs.candidates.update(dict.fromkeys(left, candidates))


def _pair_unique(
    saved: Mapping[str, Place],
    target: Mapping[str, Place],
    pairs: Pairs,
    spelled: Callable[[Place], str],
) -> None:
    """Pairs what is left over where the spelling of exactly one on each side is the same."""
    used = {*pairs.saved.values(), *(name for c in pairs.candidates.values() for name in c)}
    left = {n: p for n, p in target.items() if n not in pairs.saved and n not in pairs.candidates}
    ours = _grouped({n: p for n, p in saved.items() if n not in used}, spelled)
    for key, names in _grouped(left, spelled).items():
        found = ours.get(key, [])
        if len(names) == len(found) == 1 and _agree(saved[found[0]], target[names[0]]):
            pairs.saved[names[0]] = found[0]


def stand_ins(left: Mapping[str, Place], empties: Mapping[str, Place]) -> dict[str, str]:
    """The empty node that stands in the place of each leaf that is left over, where one does.

    It has the leaf's name, or is at the same path of the same state, which has moved.
    """

    def signature(place: Place) -> Any:
        return place.state and (place.state.root, place.state.inner)

    moved = _grouped(empties, signature)
    found = {name: name for name in left if name in empties}
    for name, place in left.items():
        for empty in moved.get(signature(place), ()):
            if name not in found and _agree(place, empties[empty]):
                found[name] = empty
    return found


def _grouped(places: Mapping[str, Place], key: Callable[[Place], Any]) -> dict[Any, list[str]]:
    """Names by what `key` makes of their places; `None` is left out."""
    groups: dict[Any, list[str]] = collections.defaultdict(list)
    for name, place in places.items():
        if (value := key(place)) is not None:
            groups[value].append(name)
    return dict(groups)
