"""One thing to do about a checkpoint that does not fit its target. Pure decisions."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set

from flaxckpt.errors import Mismatch

_GUESS = re.compile(r"\(did you mean (.*)\?\)")


def advice_for(mismatches: Sequence[Mismatch], in_optimizer: Set[str]) -> str:
    """One thing to do about `mismatches`: about those that explain most of the others.

    Args:
      mismatches: at least one.
      in_optimizer: the names of those that are leaves of optimizers, at least.
    """
    problems, names = {m.problem for m in mismatches}, {m.name for m in mismatches}
    guessed = [(m, found[1]) for m in mismatches if (found := _GUESS.fullmatch(m.note))]
    if "ambiguous" in problems:
        return (
            "Say which it is with transforms=[flaxckpt.Rename(...)], or begin the optimizer anew "
            'with opt_state="reset".'
        )
    if guessed:
        types = {m.name: m.checkpoint for m in mismatches}
        alike = [pair for pair in guessed if types.get(pair[1]) == pair[0].target]
        row, saved = (alike or guessed)[0]
        return _about_guess(row.name, saved)
    if problems <= {"missing", "unexpected"}:
        what = "optimizer" if names <= in_optimizer else "target"
        return _about_gaps(what)
    if "empty" in problems:
        return _about_empties(next(m for m in mismatches if m.problem == "empty"))
    return _about_types(problems) or _about_gaps("target")


def _about_guess(name: str, saved: str) -> str:
    """What to do when the leaf `name` may be the saved one."""
    pattern, replacement = rename(saved, name)
    rule = f"flaxckpt.Rename({_code(pattern)}, {_code(replacement)})"
    return (
        f"If that is meant, pass transforms=[{rule}]; gaps are allowed with "
        'missing="init" and unexpected="ignore".'
    )


def _about_gaps(what: str) -> str:
    """What to do about leaves that only one side has."""
    if what == "optimizer":
        return (
            "Build the optimizer the way the saved one was built, begin it anew with "
            'opt_state="reset", or allow gaps with missing="init" and unexpected="ignore".'
        )
    return (
        "Build the target the way the saved state was built, or allow gaps with "
        'missing="init" and unexpected="ignore".'
    )


def _about_types(problems: set[str]) -> str | None:
    """What to do when only types differ."""
    if problems <= {"dtype"}:
        return (
            'Give the target the saved dtypes, or pass dtype="saved" to get them, or dtype="cast" '
            'to convert them (dtype="widen" for floats to wider floats only). 64-bit types need '
            "jax_enable_x64."
        )
    if problems <= {"shape"}:
        return (
            "Build the target with the sizes that the checkpoint was saved with, or change the "
            "arrays with flaxckpt.Resize(pattern, pad=0) or flaxckpt.Apply(pattern, fn)."
        )
    if problems <= {"key impl"}:
        return "Make the target's keys with the implementation that the checkpoint has."
    return None


def _about_empties(row: Mismatch) -> str:
    """What to do about an array in the place of an empty node."""
    name = re.escape(row.name)
    if "(empty)" in row.checkpoint:
        return (
            "Build the target the way the saved state was built, or take its own value with "
            f'transforms=[flaxckpt.Fallback({_code(name)}, "target")].'
        )
    return (
        "Build the target the way the saved state was built, or leave the array out with "
        f"transforms=[flaxckpt.Drop({_code(name)})]."
    )


def rename(saved: str, target: str) -> tuple[str, str]:
    r"""A pattern and a replacement that make `target` of `saved`, and so of its siblings.

    Example:
      >>> rename("params/classifier/kernel", "params/head/kernel")
      ('params/classifier/(.*)', 'params/head/\\1')
    """
    old, new = saved.split("/"), target.split("/")
    same = 0
    while same < min(len(old), len(new)) - 1 and old[-1 - same] == new[-1 - same]:
        same += 1
    if not same:
        return re.escape(saved), _literal(target)
    before, after = "/".join(old[:-same]), "/".join(new[:-same])
    return f"{re.escape(before)}/(.*)", rf"{_literal(after)}/\1"


def _literal(text: str) -> str:
    """`text` as a replacement that has no groups."""
    return text.replace("\\", r"\\")


def _code(text: str) -> str:
    """`text` as one would write it in Python."""
    if not text.isprintable() or '"' in text:
        return repr(text)
    return f'r"{text}"' if "\\" in text else f'"{text}"'
