"""Text for people: what a terminal and a report print."""

from __future__ import annotations

import datetime
import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

# How sizes, ages, numbers and types are written.


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


# Numbers, times and names as the page writes them.


_UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
# Longer names of subtrees would leave no room for the picture.
_LONGEST = 26


def duration(seconds: float) -> str:
    """A time span, with two units where it is long.

    Example:
      >>> duration(0.1234), duration(9.5), duration(100), duration(90_000)
      ('123 ms', '9.5 s', '1 min 40 s', '1 d 1 h')
    """
    if not seconds:
        return "0 s"
    if seconds < 10:
        unit, length = next((u for u in _UNITS[3:] if seconds >= u[1]), _UNITS[-1])
        value = seconds / length
        return f"{value:.0f} {unit}" if value >= 9.95 else f"{value:.2g} {unit}"
    place = next((i for i, u in enumerate(_UNITS) if seconds >= u[1]), 3)
    (unit, length), (smaller, part) = _UNITS[place : place + 2]
    whole, rest = divmod(round(seconds / part), round(length / part))
    return f"{whole} {unit} {rest} {smaller}" if rest and unit != "s" else f"{whole} {unit}"


def moment(seconds: float | None) -> str:
    """A time, to the second; empty when it is not known."""
    return "" if seconds is None else f"{_utc(seconds):%Y-%m-%d %H:%M:%S}"


def axis_time(seconds: float) -> str:
    """A time for the axis of a plot."""
    return f"{_utc(seconds):%Y-%m-%d %H:%M:%S.%f}"


def _utc(seconds: float) -> datetime.datetime:
    """A time in UTC; one that no calendar has is the beginning of 1970."""
    try:
        return datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return datetime.datetime.fromtimestamp(0, datetime.UTC)


def percent(ratio: float) -> str:
    """A ratio as a percentage with two digits; one, where it is small.

    Example:
      >>> percent(0.123), percent(0.0000123), percent(12.3)
      ('12%', '0.001%', '1230%')
    """
    if not ratio or not math.isfinite(ratio):
        return "0%" if not ratio else "-"
    places = math.floor(math.log10(100 * ratio))
    digits = max(0, 1 - places if places >= -1 else -places)
    return f"{100 * ratio:.{digits}f}%" if digits < 8 else f"{100 * ratio:.0e}%"


def label(name: str) -> str:
    """A name for a plot, where some of HTML would be taken for markup."""
    return html.escape(name, quote=False)


def short_title(name: str) -> str:
    """A key path for an axis: its end, where it is long.

    Example:
      >>> short_title("params/encoder/layers/attention/query")
      '…layers/attention/query'
    """
    while len(name) > _LONGEST and "/" in name.lstrip("…"):
        name = "…" + name.lstrip("…").partition("/")[2]
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
