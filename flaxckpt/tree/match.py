"""Which saved leaf is which leaf of the target."""

from __future__ import annotations

import collections
import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, Protocol

from flaxckpt.errors import Mismatch
from flaxckpt.tree.keypaths import child_name, parse_name
from flaxckpt.tree.node import MAPPING_KINDS, SEQUENCE_KINDS, Node

# The states of optimizers within a tree: NamedTuples of optax, or what other trees make of them.
#
# An optimizer is the topmost node of which nothing but states lies below: a NamedTuple of optax, a
# tuple of these; and whatever is called `opt_state`. In trees that have lost the classes (nnx,
# other libraries), a state is a mapping that has the fields of one, or one member of a chain.


# What flax calls the state of an optimizer in its own classes.
OPT_STATE = "opt_state"

Fields = frozenset[Any]


class State(NamedTuple):
    """The state of one gradient transformation that a leaf lies in.

    Attributes:
      root: the keys of the optimizer that it belongs to, and `inner` those from the state to the
        leaf, in the spelling that all trees have in common.
      class_name: its class, without the module; empty in trees that do not tell.
      fields: the names of its fields.
    """

    root: str
    class_name: str
    fields: Fields
    inner: str = ""


class Known(NamedTuple):
    """What the classes of one tree tell about another that has none.

    Attributes:
      fields: the fields of each class of state.
      roots: the keys of the optimizers, in the common spelling.
    """

    fields: frozenset[Fields] = frozenset()
    roots: frozenset[str] = frozenset()


def is_state(node: Node | None) -> bool:
    """Whether a node is the state of one of optax's gradient transformations."""
    return node is not None and node.kind == "namedtuple" and node.class_name.startswith("optax.")


def state_fields(nodes: Sequence[Node | None]) -> frozenset[Fields]:
    """The fields of each class of optimizer state in a tree."""
    return frozenset(_fields(node) for node in nodes if node is not None and is_state(node)) - {
        frozenset()
    }


def _fields(node: Node) -> Fields:
    """The keys of a node."""
    return frozenset(key.value for key in node.keys)


def optimizers(nodes: Sequence[Node | None]) -> list[bool]:
    """Whether each node of a preorder has nothing but states of optax in it, and at least one."""
    found = [(False, False)] * len(nodes)
    stack: list[tuple[bool, bool]] = []  # of the children: nothing else in it, a state in it
    for position in reversed(range(len(nodes))):
        node = nodes[position]
        below = [stack.pop() for _ in node.keys] if node is not None else []
        if node is None:
            found[position] = (False, False)
        elif is_state(node) or not node.keys:
            found[position] = (True, is_state(node))
        elif node.kind in SEQUENCE_KINDS:
            found[position] = (all(only for only, _ in below), any(has for _, has in below))
        stack.append(found[position])
    return [only and has for only, has in found]


def as_state(node: Node, parent: Node | None, root: str, known: Known) -> State | None:
    """The state that `node` is, within the optimizer `root`; `None` when it is none.

    The `parent` is that of the node; the optimizer itself has none.
    """
    if is_state(node):
        return State(root, node.class_name.rpartition(".")[2], _fields(node))
    if node.kind not in MAPPING_KINDS or not node.keys:
        return None
    fields = _fields(node)
    if known.fields:
        return State(root, "", fields) if fields in known.fields else None
    is_member = parent is None or _is_chain(parent)
    return State(root, "", fields) if is_member and not _is_chain(node) else None


def _is_chain(node: Node) -> bool:
    """Whether a node is a sequence, also one that has become a mapping by index."""
    if node.kind in SEQUENCE_KINDS:
        return True
    keys = (str(key.value) for key in node.keys)
    return node.kind in MAPPING_KINDS and all(key.isdecimal() for key in keys)


# Which saved leaf belongs to which leaf of a target, when they are not called the same.
#
# A leaf is the saved leaf of its name. Only what is left over is looked for elsewhere, in this
# order, and only where there is exactly one candidate:
#
# 1. the same state of an optimizer at another position of its chain: the same class, the same path
#    within it, and the same optimizer (`opt_state/0/mu/w` and `opt_state/1/0/mu/w`);
# 2. the same path in another spelling: `'0'` for `0`, boxed for unboxed, `a.b` for `a/b`;
# 3. NamedTuples by index.
#
# What lies in two states of different classes is never one leaf, whatever its name.


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


# The places of the leaves and the empty nodes of a tree, for pairing.


class _Above(NamedTuple):
    """What is known of a node from those above it.

    Attributes:
      name: its name, `keys` and `positions`: its keys, as they are and as indices.
      root: the optimizer that it is in.
      state: the state that it is in, and `depth`: how many keys lead there.
      parent: the node above it, within the optimizer.
    """

    name: str = ""
    keys: tuple[Any, ...] = ()
    positions: tuple[Any, ...] = ()
    root: str | None = None
    state: State | None = None
    depth: int = 0
    parent: Node | None = None


def places(nodes: Sequence[Node | None], known: Known = Known()) -> dict[str, Place]:
    """The place of each leaf and of each empty node, by name.

    Args:
      nodes: a tree in preorder, `None` for a leaf.
      known: what the classes of the other tree tell.
    """
    found: dict[str, Place] = {}
    pending = [_Above()]
    for node, is_optimizer in zip(nodes, optimizers(nodes), strict=True):
        above = pending.pop()
        if node is None or not node.keys:
            found[above.name] = _place(above)
        elif node.is_box:
            pending.append(above)
        else:
            here = _entered(above, node, known) if _is_within(above, is_optimizer, known) else above
            pending += reversed(list(_below(here, node)))
    return found


def _place(above: _Above) -> Place:
    """The place of a leaf."""
    state = above.state and above.state._replace(inner=spelling(above.keys[above.depth :]))
    return Place(spelling(above.keys), spelling(above.positions), state)


def _is_within(above: _Above, is_optimizer: bool, known: Known) -> bool:
    """Whether a node is an optimizer, or a part of one."""
    named = bool(above.keys) and above.keys[-1] == OPT_STATE
    known_root = spelling(above.keys) in known.roots
    return above.root is not None or is_optimizer or named or known_root


def _entered(above: _Above, node: Node, known: Known) -> _Above:
    """What is known at a node of an optimizer."""
    root = spelling(above.keys) if above.root is None else above.root
    state = as_state(node, above.parent, root, known)
    if state is None:
        return above._replace(root=root)
    return above._replace(root=root, state=state, depth=len(above.keys))


def _below(above: _Above, node: Node) -> Iterator[_Above]:
    """What is known of each child of `node`."""
    parent = node if above.root is not None else None
    for index, key in enumerate(node.keys):
        position = index if node.kind == "namedtuple" else key.value
        yield above._replace(
            name=child_name(above.name, key.value),
            keys=(*above.keys, key.value),
            positions=(*above.positions, position),
            parent=parent,
        )


def known_by(nodes: Sequence[Node | None]) -> Known:
    """What the classes of a tree tell about another that has none."""
    states = (place.state for place in places(nodes).values())
    roots = frozenset(state.root for state in states if state is not None and state.class_name)
    return Known(state_fields(nodes), roots)


# Matching the leaves of a checkpoint and of a target. Pure decisions.


# More rows than this are listed without a guess at what was meant: guessing is slow.
MAX_GUESSES = 50
NO_EMPTIES: Mapping[str, str] = {}


class Typed(Protocol):
    """A leaf whose type may have to be computed first."""

    @property
    def spec(self) -> Any:
        """Its type; `str(spec)` is shown."""


class Sides(NamedTuple):
    """The two sides of a match.

    Attributes:
      saved: the leaves of the checkpoint, by name. The type of one is only asked for when it is
        compared or shown.
      target: the type of each leaf of the target, by name.
      saved_empties: what the empty node of the checkpoint in the place of a leaf is, by its name.
      target_empties: the same for the target.
      in_optimizer: leaves of optimizers, of which one is never meant for another.
    """

    saved: Mapping[str, Typed]
    target: Mapping[str, Any]
    saved_empties: Mapping[str, str] = NO_EMPTIES
    target_empties: Mapping[str, str] = NO_EMPTIES
    in_optimizer: Set[str] = frozenset()


class Gaps(NamedTuple):
    """What a restore may leave open, by name."""

    initialises: Callable[[str], bool] = lambda name: False
    ignores: Callable[[str], bool] = lambda name: False


class Match(NamedTuple):
    """What a match found.

    Attributes:
      mismatches: every leaf on which the two disagree, in the target's order.
      initialised: leaves of the target that the checkpoint lacks, which is allowed.
      ignored: leaves of the checkpoint that the target lacks, which is allowed.
    """

    mismatches: Sequence[Mismatch]
    initialised: Sequence[str]
    ignored: Sequence[str]


def match(
    sides: Sides, pairs: Pairs, problem: Callable[[Any, Any], str], gaps: Gaps = Gaps()
) -> Match:
    """Compares a checkpoint with a target.

    Args:
      sides: the two.
      pairs: which leaf belongs to which.
      problem: why one type does not fit the other; `""` when it does.
      gaps: what may be missing. An empty node in the place of an array never is.
    """
    used = set(pairs.saved.values()).union(*pairs.candidates.values())
    left = [name for name in sides.saved if name not in used]
    known = pairs.saved.keys() | pairs.candidates.keys() | sides.saved_empties.keys()
    initialised = [n for n in sides.target if n not in known and gaps.initialises(n)]
    ignored = [n for n in left if n not in sides.target_empties and gaps.ignores(n)]
    guess = _Guess({n: sides.saved[n] for n in left if n not in sides.in_optimizer})
    skipped = {*initialised, *ignored}
    found = [_target_row(n, sides, pairs, problem, guess) for n in sides.target if n not in skipped]
    rows = [row for row in found if row is not None]
    rows += [_saved_row(name, sides) for name in left if name not in skipped]
    return Match(rows, initialised, ignored)


def _target_row(
    name: str, sides: Sides, pairs: Pairs, problem: Callable[[Any, Any], str], guess: _Guess
) -> Mismatch | None:
    """What is wrong with the leaf `name` of the target, which needs a saved one."""
    wanted = sides.target[name]
    if (saved := pairs.saved.get(name)) is not None:
        spec = sides.saved[saved].spec
        note = "" if saved == name else f"(saved as {saved})"
        why = problem(spec, wanted)
        return Mismatch(why, name, str(spec), str(wanted), note) if why else None
    if (candidates := pairs.candidates.get(name)) is not None:
        note = f"(may be {' or '.join(candidates)})"
        return Mismatch("ambiguous", name, "-", str(wanted), note)
    if (empty := sides.saved_empties.get(name)) is not None:
        return Mismatch("empty", name, empty, str(wanted), _masked(empty, "checkpoint"))
    note = "" if name in sides.in_optimizer else guess(name, str(wanted))
    return Mismatch("missing", name, "-", str(wanted), note)


def _saved_row(name: str, sides: Sides) -> Mismatch:
    """What is wrong with the leaf `name` of the checkpoint, which the target has no place for."""
    spec = str(sides.saved[name].spec)
    if (empty := sides.target_empties.get(name)) is not None:
        return Mismatch("empty", name, spec, empty, _masked(empty, "target"))
    return Mismatch("unexpected", name, spec, "-")


def _masked(empty: str, side: str) -> str:
    """What is to be said of a node that stands for a masked parameter."""
    return f"(masked in the {side})" if empty.startswith("MaskedNode") else ""


class _Guess:
    """Guesses which leaf of the checkpoint a missing one was meant to be."""

    def __init__(self, candidates: Mapping[str, Typed]):
        self._leaves = candidates
        self._left = MAX_GUESSES

    @functools.cached_property
    def _candidates(self) -> dict[str, str]:
        """The types of the candidates."""
        return {name: str(leaf.spec) for name, leaf in self._leaves.items()}

    def __call__(self, name: str, spec: str) -> str:
        """`(did you mean ...?)`, preferring leaves of the same type; or nothing."""
        self._left -= 1
        if self._left < 0:
            return ""
        alike = [n for n, s in self._candidates.items() if s == spec]
        found = _closest(name, alike) or _closest(name, self._candidates)
        return f"(did you mean {found}?)" if found else ""


def _closest(name: str, candidates: Iterable[str]) -> str:
    """The candidate most like `name`, when one is like it at all."""
    close = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
    return close[0] if close else ""
