"""Numbers, times and names as the page writes them."""

from __future__ import annotations

import datetime
import html
import math

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


def short(name: str) -> str:
    """A key path for an axis: its end, where it is long.

    Example:
      >>> short("params/encoder/layers/attention/query")
      '…layers/attention/query'
    """
    while len(name) > _LONGEST and "/" in name.lstrip("…"):
        name = "…" + name.lstrip("…").partition("/")[2]
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
