"""Matching the leaves of a checkpoint and of a target. Pure decisions."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple, Protocol

from flaxckpt.errors import Mismatch
from flaxckpt.tree.pairing import Pairs

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
