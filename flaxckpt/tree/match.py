"""Matching the leaves of a checkpoint and of a target by their names. Pure decisions."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flaxckpt.errors import Mismatch

# More rows than this are listed without a guess at what was meant: guessing is slow.
MAX_GUESSES = 50


def match(
    saved: Mapping[str, Any],
    target: Mapping[str, Any],
    problem: Callable[[Any, Any], str],
    *,
    saved_empties: Mapping[str, str] | None = None,
    target_empties: Mapping[str, str] | None = None,
) -> list[Mismatch]:
    """Every leaf on which a checkpoint and a target disagree, in the target's order.

    Args:
      saved: the spec of each leaf of the checkpoint, by name; `str(spec)` is shown.
      target: the same for the target.
      problem: why one spec does not fit the other; `""` when it does.
      saved_empties: what each empty node of the checkpoint is, by name.
      target_empties: the same for the target.

    Example:
      >>> [m.problem for m in match({"a": "int"}, {"b": "int"}, lambda saved, target: "")]
      ['missing', 'unexpected']
    """
    unexpected = [name for name in saved if name not in target]
    guess = _Guess({name: str(saved[name]) for name in unexpected})
    rows = []
    for name, spec in target.items():
        if name not in saved:
            side = (saved_empties or {}).get(name, "-")
            rows.append(Mismatch("missing", name, side, str(spec), guess(name, str(spec))))
        elif why := problem(saved[name], spec):
            rows.append(Mismatch(why, name, str(saved[name]), str(spec)))
    for name in unexpected:
        side = (target_empties or {}).get(name, "-")
        rows.append(Mismatch("unexpected", name, str(saved[name]), side))
    return rows


class _Guess:
    """Guesses which leaf of the checkpoint a missing one was meant to be."""

    def __init__(self, candidates: Mapping[str, str]):
        self._candidates = candidates
        self._left = MAX_GUESSES

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
