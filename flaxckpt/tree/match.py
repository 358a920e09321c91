"""Which saved leaf is which leaf of the target, and what does not fit. Pure decisions.

`match` shows the whole way: it drops the leaves that get no saved value, finds the place of each
other leaf in its tree, pairs the places, and lists each leaf without a fitting partner.

**Pairing.** The rules in `RULES` are tried in this order, each on the leaves that are left over. No
leaf is paired twice, and leaves of optimizer states of different classes are never paired.

| rule            | a saved leaf and a leaf of the target are the same when they have the same     |
|-----------------|--------------------------------------------------------------------------------|
| `same_name`     | name                                                                           |
| `moved_state`   | path within optimizer states of one class in one optimizer: `opt_state/0/mu/w` |
|                 | and `opt_state/1/0/mu/w`. With several such states, the leaf is `ambiguous`    |
| `same_spelling` | path in another spelling, which no other leaf has: `'0'` for `0`, boxed for    |
|                 | unboxed, `a.b` for `a/b`                                                       |
| `same_position` | path when fields of NamedTuples are indices, which no other leaf has           |

**Listing.** The first line that holds decides about a leaf:

| a leaf of the target                                         | becomes                           |
|--------------------------------------------------------------|-----------------------------------|
| has a partner that does not fit                              | a mismatch: `shape`, `dtype`, ... |
| has several candidates                                       | a mismatch: `ambiguous`           |
| has an empty node of the checkpoint in its place             | a mismatch: `empty`               |
| may be missing                                               | initialised                       |
| has no partner                                               | a mismatch: `missing`             |

| a saved leaf without a partner                               | becomes                           |
|--------------------------------------------------------------|-----------------------------------|
| has an empty node of the target in its place                 | a mismatch: `empty`               |
| may be unexpected                                            | ignored                           |
| any other                                                    | a mismatch: `unexpected`          |

**Optimizers.** An optimizer is the topmost node that has only optax states below it (a NamedTuple
of optax, a tuple of these), and each node called `opt_state`. In a tree that has lost its classes
(nnx, other libraries), a state is a mapping with the fields of a state of the other tree, or one
member of a chain.
"""

from __future__ import annotations

import collections
import difflib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from flaxckpt.errors import Mismatch
from flaxckpt.tree.keypaths import child_name, parse_name
from flaxckpt.tree.node import MAPPING_KINDS, SEQUENCE_KINDS, Node, named_nodes

Nodes = Sequence[Node | None]
# Why the saved type (first) does not fit the target's (second); "" when it does.
TypeProblem = Callable[[Any, Any], str]

# More rows than this are listed without a guess at what was meant, because guessing is slow.
MAX_GUESSES = 50
# The name that flax gives to the state of an optimizer in its own classes.
_OPT_STATE = "opt_state"
# What errors call a kind of node that has another name in Python.
_KIND = {"none": "None"}
# The last keys of boxes, in trees that other libraries have saved.
_BOXES = frozenset({"value", "raw_value"})


class SavedSide(NamedTuple):
    """A checkpoint.

    Attributes:
      nodes: its structure.
      leaves: by name; each has its type as `spec`, which is only asked for to compare or to show.
      displaced: the leaves that a transform made or moved: only their names tell where they are.
    """

    nodes: Nodes
    leaves: Mapping[str, Any]
    displaced: Set[str] = frozenset()


class TargetSide(NamedTuple):
    """A target: its structure, and the types of the leaves that are wanted, by name."""

    nodes: Nodes
    types: Mapping[str, Any]


class Allowed(NamedTuple):
    """The leaves, by name, that need no partner.

    Attributes:
      missing: of the target.
      unexpected: of the checkpoint.
      given: of the target, and have a value already.
      resets_optimizers: whether the state of optimizers is one of them, on both sides.
    """

    missing: Set[str] = frozenset()
    unexpected: Set[str] = frozenset()
    given: Set[str] = frozenset()
    resets_optimizers: bool = False


class Matching(NamedTuple):
    """The result of `match`.

    Attributes:
      saved: the name of the saved leaf, for each leaf of the target that has one.
      mismatches: every leaf on which the two disagree, in the target's order.
      initialised: the leaves of the target that get a value from elsewhere.
      ignored: the saved leaves that are left out.
      in_optimizer: the leaves without a partner that are state of an optimizer.
    """

    saved: Mapping[str, str]
    mismatches: Sequence[Mismatch]
    initialised: Sequence[str] = ()
    ignored: Sequence[str] = ()
    in_optimizer: Set[str] = frozenset()


def match(
    saved: SavedSide, target: TargetSide, problem: TypeProblem, allowed: Allowed = Allowed()
) -> Matching:
    """Finds the saved leaf of each leaf of a target, and lists what does not fit."""
    is_whole = not allowed.given and not allowed.resets_optimizers
    if is_whole and saved.nodes == target.nodes and saved.leaves.keys() == target.types.keys():
        misfits = (_misfit(name, name, saved, target, problem) for name in target.types)
        return Matching({name: name for name in target.types}, [m for m in misfits if m])

    # The place of each leaf that may have a partner.
    ours, theirs = _places_of_both(saved, target)
    resets = allowed.resets_optimizers
    unused = {n for n in saved.leaves if resets and _is_of_optimizer(n, ours)}
    fresh = {n for n in target.types if resets and _is_of_optimizer(n, theirs)} | allowed.given
    here = {
        name: place_of(name) if name in saved.displaced else ours[name]
        for name in saved.leaves
        if name not in unused and name not in allowed.given
    }
    there = {name: theirs[name] for name in target.types if name not in fresh}

    # The pairs, and the leaves that are left over: `alone` in the checkpoint, `lacking` in it.
    pairs = pair(here, there)
    used = {*pairs.saved.values(), *(n for names in pairs.candidates.values() for n in names)}
    alone = {name: place for name, place in here.items() if name not in used}
    lacking = {name: place for name, place in there.items() if name not in pairs.saved}
    in_optimizer = {n for n in alone if _is_of_optimizer(n, ours)}
    in_optimizer |= {n for n in lacking if _is_of_optimizer(n, theirs)}

    # What each leaf becomes.
    filled = empty_nodes(lacking, saved.nodes, ours)
    emptied = empty_nodes(alone, target.nodes, theirs)
    doubtful = pairs.candidates.keys() | filled.keys()
    initialised = [n for n in lacking if n in allowed.missing and n not in doubtful]
    ignored = [n for n in alone if n in allowed.unexpected and n not in emptied]
    guess = _Guess({n: saved.leaves[n] for n in alone if n not in in_optimizer})
    skipped = {*initialised, *ignored}
    rows = [
        _lacking_row(name, str(target.types[name]), pairs, filled, guess, name in in_optimizer)
        if name in lacking
        else _misfit(name, pairs.saved[name], saved, target, problem)
        for name in there
        if name not in skipped
    ]
    rows += [
        _alone_row(name, str(saved.leaves[name].spec), emptied)
        for name in alone
        if name not in skipped
    ]
    return Matching(
        {name: pairs.saved[name] for name in there if name in pairs.saved},
        [row for row in rows if row],
        [*(n for n in target.types if n in fresh), *initialised],
        [*(n for n in saved.leaves if n in unused), *ignored],
        in_optimizer,
    )


def _misfit(
    name: str, partner: str, saved: SavedSide, target: TargetSide, problem: TypeProblem
) -> Mismatch | None:
    """The row of a leaf of the target that its partner does not fit."""
    spec, wanted = saved.leaves[partner].spec, target.types[name]
    note = "" if partner == name else f"(saved as {partner})"
    why = problem(spec, wanted)
    return Mismatch(why, name, str(spec), str(wanted), note) if why else None


def _lacking_row(
    name: str,
    wanted: str,
    pairs: Pairs,
    filled: Mapping[str, str],
    guess: _Guess,
    in_optimizer: bool,
) -> Mismatch:
    """The row of a leaf of the target without a partner."""
    if (candidates := pairs.candidates.get(name)) is not None:
        note = f"(may be {' or '.join(candidates)})"
        return Mismatch("ambiguous", name, "-", wanted, note)
    if (empty := filled.get(name)) is not None:
        return Mismatch("empty", name, empty, wanted, _masked(empty, "checkpoint"))
    return Mismatch("missing", name, "-", wanted, "" if in_optimizer else guess(name, wanted))


def _alone_row(name: str, spec: str, emptied: Mapping[str, str]) -> Mismatch:
    """The row of a saved leaf without a partner."""
    if (empty := emptied.get(name)) is not None:
        return Mismatch("empty", name, spec, empty, _masked(empty, "target"))
    return Mismatch("unexpected", name, spec, "-")


def _masked(empty: str, side: str) -> str:
    """A note about a node that stands for a masked parameter."""
    return f"(masked in the {side})" if empty.startswith("MaskedNode") else ""


class _Guess:
    """Guesses which saved leaf a missing one was meant to be."""

    def __init__(self, candidates: Mapping[str, Any]):
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


# Pairing places by the rules of the table.


class OptimizerState(NamedTuple):
    """The state of one gradient transformation.

    Attributes:
      root: the path of its optimizer, in the common spelling.
      class_name: its class, without the module; empty in trees that have lost their classes.
      fields: the names of its fields.
      inner: the path from the state to a leaf, in the common spelling.
    """

    root: str
    class_name: str
    fields: frozenset[Any]
    inner: str = ""


class TreePlace(NamedTuple):
    """Where a leaf is.

    Attributes:
      spelling: its path, in the common spelling.
      positions: the same, with the fields of NamedTuples as indices.
      state: the optimizer state that it is in, if it is in one.
    """

    spelling: str
    positions: str
    state: OptimizerState | None = None


Places = Mapping[str, TreePlace]


class Pairs(NamedTuple):
    """The pairs that are known.

    Attributes:
      saved: the saved leaf of each leaf of the target that has one.
      candidates: the saved leaves that each ambiguous leaf of the target may be.
    """

    saved: dict[str, str]
    candidates: dict[str, Sequence[str]]


def pair(saved: Places, target: Places) -> Pairs:
    """Pairs leaves by `RULES`, given the places of the leaves of both sides by name.

    Example:
      >>> pair({"a/0": place_of("a/0")}, {"a/%30": place_of("a/%30")}).saved
      {'a/%30': 'a/0'}
    """
    pairs = Pairs({}, {})
    for rule in RULES:
        found = rule(saved, target, pairs)
        pairs = Pairs(pairs.saved | found.saved, pairs.candidates | found.candidates)
    return pairs


def same_name(saved: Places, target: Places, known: Pairs) -> Pairs:
    """Pairs leaves of one name."""
    del known
    return Pairs({n: n for n, p in target.items() if n in saved and _may_pair(saved[n], p)}, {})


def moved_state(saved: Places, target: Places, known: Pairs) -> Pairs:
    """Pairs the leaves of states that have moved within their optimizer."""
    sides = (saved.values(), target.values())
    by_class = all(any(p.state and p.state.class_name for p in places) for places in sides)

    def signature(place: TreePlace) -> Any:
        state = place.state
        if state is None:
            return None
        return state.root, state.class_name if by_class else state.fields, state.inner

    ours, used = _grouped(saved, signature), set(known.saved.values())
    found = Pairs({}, {})
    for key, names in _grouped(target, signature).items():
        left = [name for name in names if name not in known.saved]
        candidates = [name for name in ours.get(key, ()) if name not in used]
        if left and candidates:
            if len(names) == len(ours[key]) == 1:
                found.saved[left[0]] = candidates[0]
            else:
                found.candidates.update(dict.fromkeys(left, candidates))
    return found


def same_spelling(saved: Places, target: Places, known: Pairs) -> Pairs:
    """Pairs the only leaf of either side with a path in the common spelling."""
    return _pair_unique(saved, target, known, lambda place: place.spelling)


def same_position(saved: Places, target: Places, known: Pairs) -> Pairs:
    """Pairs the only leaf of either side with a path by index."""
    return _pair_unique(saved, target, known, lambda place: place.positions)


Rule = Callable[[Places, Places, Pairs], Pairs]
RULES: Sequence[Rule] = (same_name, moved_state, same_spelling, same_position)


def _pair_unique(
    saved: Places, target: Places, known: Pairs, path: Callable[[TreePlace], str]
) -> Pairs:
    """Pairs leaves that are left over and have a path that no other one on their side has."""
    used = {*known.saved.values(), *(name for c in known.candidates.values() for name in c)}
    ours = _grouped({n: p for n, p in saved.items() if n not in used}, path)
    matched = known.saved.keys() | known.candidates.keys()
    theirs = _grouped({n: p for n, p in target.items() if n not in matched}, path)
    both = ((names, ours.get(key, [])) for key, names in theirs.items())
    alone = ((names[0], found[0]) for names, found in both if len(names) == len(found) == 1)
    return Pairs({n: found for n, found in alone if _may_pair(saved[found], target[n])}, {})


def _may_pair(a: TreePlace, b: TreePlace) -> bool:
    """Whether two places are not in optimizer states of different classes."""
    if a.state is None or b.state is None:
        return True
    if a.state.class_name and b.state.class_name:
        return a.state.class_name == b.state.class_name
    return a.state.fields == b.state.fields


def _grouped(places: Places, key: Callable[[TreePlace], Any]) -> dict[Any, list[str]]:
    """Names by what `key` makes of their places; `None` is left out."""
    groups: dict[Any, list[str]] = collections.defaultdict(list)
    for name, place in places.items():
        if (value := key(place)) is not None:
            groups[value].append(name)
    return dict(groups)


def empty_nodes(left: Places, nodes: Nodes, places: Places) -> dict[str, str]:
    """The empty node, as errors show it, in the place of each leaf of `left` that has one there.

    The empty node has the leaf's name, or is at the same path of the same state, which has moved.

    Args:
      left: the leaves of one side without a partner.
      nodes: the structure of the other side.
      places: the places of its leaves and empty nodes.
    """
    if not left:
        return {}
    shown = {
        name: f"{node.class_name.rpartition('.')[2] or _KIND.get(node.kind, node.kind)} (empty)"
        for name, node in named_nodes(nodes)
        if node is not None and not node.keys
    }

    def signature(place: TreePlace) -> Any:
        return place.state and (place.state.root, place.state.inner)

    moved = _grouped({name: places[name] for name in shown}, signature)
    found = {name: shown[name] for name in left if name in shown}
    for name, place in left.items():
        for empty in moved.get(signature(place), ()):
            if name not in found and _may_pair(place, places[empty]):
                found[name] = shown[empty]
    return found


# The places of the leaves and the empty nodes of a tree.


def place_of(name: str) -> TreePlace:
    """The place of a leaf of which only the name is known."""
    spelled = spelling(parse_name(name))
    return TreePlace(spelled, spelled)


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


class KnownStates(NamedTuple):
    """What the classes of one tree tell about another that has lost them.

    Attributes:
      fields: the fields of each class of state.
      roots: the paths of the optimizers, in the common spelling.
    """

    fields: frozenset[frozenset[Any]] = frozenset()
    roots: frozenset[str] = frozenset()


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
    state: OptimizerState | None = None
    depth: int = 0
    parent: Node | None = None


def _places_of_both(saved: SavedSide, target: TargetSide) -> tuple[Places, Places]:
    """The places of all leaves and empty nodes of both sides, which tell of each other's states."""
    return (
        places_of(saved.nodes, known_by(target.nodes)),
        places_of(target.nodes, known_by(saved.nodes)),
    )


def known_by(nodes: Nodes) -> KnownStates:
    """What the classes of a tree tell about another one."""
    fields = frozenset(_fields(node) for node in nodes if node is not None and _is_state(node))
    states = (place.state for place in places_of(nodes).values())
    roots = frozenset(state.root for state in states if state is not None and state.class_name)
    return KnownStates(fields - {frozenset()}, roots)


def places_of(nodes: Nodes, known: KnownStates = KnownStates()) -> dict[str, TreePlace]:
    """The place of each leaf and of each empty node of a preorder, by name."""
    found: dict[str, TreePlace] = {}
    pending = [_Above()]
    for node, is_optimizer in zip(nodes, _optimizers(nodes), strict=True):
        above = pending.pop()
        if node is None or not node.keys:
            keys = above.keys
            state = above.state and above.state._replace(inner=spelling(keys[above.depth :]))
            found[above.name] = TreePlace(spelling(keys), spelling(above.positions), state)
        elif node.is_box:
            pending.append(above)
        else:
            within = above.root is not None or is_optimizer or above.keys[-1:] == (_OPT_STATE,)
            if within or spelling(above.keys) in known.roots:
                above = _entered(above, node, known)
            pending += reversed(list(_below(above, node)))
    return found


def _entered(above: _Above, node: Node, known: KnownStates) -> _Above:
    """What is known at a node of an optimizer."""
    root = spelling(above.keys) if above.root is None else above.root
    state = _as_state(node, above.parent, root, known)
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


def _as_state(
    node: Node, parent: Node | None, root: str, known: KnownStates
) -> OptimizerState | None:
    """The state that `node` is, within the optimizer `root`; `None` when it is not a state.

    The `parent` is that of the node; the optimizer itself has none.
    """
    fields = _fields(node)
    if _is_state(node):
        return OptimizerState(root, node.class_name.rpartition(".")[2], fields)
    if node.kind not in MAPPING_KINDS or not node.keys:
        return None
    if known.fields:
        return OptimizerState(root, "", fields) if fields in known.fields else None
    is_member = parent is None or _is_chain(parent)
    return OptimizerState(root, "", fields) if is_member and not _is_chain(node) else None


def _optimizers(nodes: Nodes) -> list[bool]:
    """Whether each node of a preorder has nothing but states of optax in it, and at least one."""
    found = [(False, False)] * len(nodes)
    stack: list[tuple[bool, bool]] = []  # of the children: nothing else in it, a state in it
    for position in reversed(range(len(nodes))):
        node = nodes[position]
        below = [stack.pop() for _ in node.keys] if node is not None else []
        if node is None:
            found[position] = (False, False)
        elif _is_state(node) or not node.keys:
            found[position] = (True, _is_state(node))
        elif node.kind in SEQUENCE_KINDS:
            found[position] = (all(only for only, _ in below), any(has for _, has in below))
        stack.append(found[position])
    return [only and has for only, has in found]


def _is_of_optimizer(name: str, places: Places) -> bool:
    """Whether a leaf is state of an optimizer: in one of optax's, or below `opt_state`."""
    place = places.get(name)
    return (place is not None and place.state is not None) or _OPT_STATE in parse_name(name)[:-1]


def _is_state(node: Node) -> bool:
    """Whether a node is the state of one of optax's gradient transformations."""
    return node.kind == "namedtuple" and node.class_name.startswith("optax.")


def _fields(node: Node) -> frozenset[Any]:
    return frozenset(key.value for key in node.keys)


def _is_chain(node: Node) -> bool:
    """Whether a node is a sequence, also one that has become a mapping by index."""
    if node.kind in SEQUENCE_KINDS:
        return True
    keys = (str(key.value) for key in node.keys)
    return node.kind in MAPPING_KINDS and all(key.isdecimal() for key in keys)
