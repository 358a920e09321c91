"""How sizes, ages, numbers and types are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_SIZES = ("B", "kB", "MB", "GB", "TB", "PB")
_AGES = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
# A value or a list of metrics takes at most so many characters.
MAX_TEXT = 60


def size(nbytes: int) -> str:
    """A number of bytes, in powers of 1000.

    Example:
      >>> size(999), size(1000), size(1_234_567_890)
      ('999 B', '1.0 kB', '1.2 GB')
    """
    value, unit = float(nbytes), 0
    while value >= 999.95 and unit < len(_SIZES) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.1f} {_SIZES[unit]}" if unit else f"{nbytes} B"


def age(seconds: float) -> str:
    """How long ago something was.

    Example:
      >>> age(59), age(200), age(7200), age(200_000)
      ('59 s', '3 min', '2 h', '2 d')
    """
    unit, length = next((u for u in _AGES if seconds >= u[1]), ("s", 1))
    return f"{max(0, int(seconds // length))} {unit}"


def number(value: Any) -> str:
    """A number, with six digits; a hyphen for none.

    Example:
      >>> number(1 / 3), number(7), number(None)
      ('0.333333', '7', '-')
    """
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def share(part: int, whole: int) -> str:
    """A part of a whole."""
    return f"{100 * part / whole:.1f}%" if whole else "-"


def plural(count: int, noun: str) -> str:
    """A number of things.

    Example:
      >>> plural(1, "leaf"), plural(2, "leaf"), plural(2, "step")
      ('1 leaf', '2 leaves', '2 steps')
    """
    many = "leaves" if noun == "leaf" else f"{noun}s"
    return f"{count} {noun if count == 1 else many}"


def clean(text: str) -> str:
    r"""`text` without what would move the cursor: names in a checkpoint are not trusted.

    Example:
      >>> clean("a\x1b[2J")
      'a\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def short(text: str) -> str:
    """At most so much of `text`."""
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."


def metrics(values: Mapping[str, float]) -> str:
    """Metrics on one line."""
    return "  ".join(f"{name}={number(value)}" for name, value in values.items())


def sharding(found: Any) -> str:
    """How an array was sharded, as `StoredArray.sharding` has it.

    Example:
      >>> sharding({"mesh": {"axis_names": ["x"], "shape": [4]}, "spec": ["x", None]})
      "P('x', None) of x=4"
    """
    if found is None:
        return ""
    entries = (tuple(p) if isinstance(p, list) else p for p in found["spec"])
    axes = zip(found["mesh"]["axis_names"], found["mesh"]["shape"], strict=True)
    mesh = ",".join(f"{name}={length}" for name, length in axes)
    return f"P({', '.join(map(repr, entries))}) of {mesh}"


def class_of(kind: str, class_name: str) -> str:
    """What a container is called; nothing for a plain dict."""
    if kind == "dict":
        return ""
    return class_name.rpartition(".")[2] or kind


def join(names: Sequence[object], limit: int = 8) -> str:
    """The first few of some names."""
    more = f", and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(clean(str(name)) for name in names[:limit]) + more
