"""The tables of the states: both sides, and flaxckpt beside the limits of the machine."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks import limits
from benchmarks.states import NAMES
from benchmarks.table import Row, Table
from benchmarks.targets import row

# Which of our times is compared with which of the limits.
BESIDE = {
    "save": ["dd conv=fsync"],
    "restore, cold": ["cold read by dd"],
    "restore": list(limits.WARM),
}


def comparison(name: str, found: dict[str, Any]) -> Table:
    """Times, files and memory of one state, of both sides."""
    size = f"{found['leaves']:,} leaves, {found['nbytes'] / 1e6:,.1f} MB"
    rows = [*times(name, found["seconds"]), *disk(name, found["disk"])]
    rows += peaks(name, found.get("peak", {}))
    return Table(name, rows, note=f"{NAMES[name[0]]}: {size}.")


def times(name: str, seconds: dict[str, dict[str, list[float]]]) -> Iterator[Row]:
    """The medians of the times."""
    for what, ours in seconds["flaxckpt"].items():
        other = median(seconds["Orbax"][what])
        yield row(name, f"{what}, ms", median(ours) * 1e3, other * 1e3)


def disk(name: str, stored: dict[str, dict[str, int]]) -> Iterator[Row]:
    """What a checkpoint is on disk."""
    ours, other = stored["flaxckpt"], stored["Orbax"]
    yield row(name, "files", ours["files"], other["files"])
    yield row(name, "on disk, MB", ours["bytes"] / 1e6, other["bytes"] / 1e6)


def peaks(name: str, peak: dict[str, dict[str, float]]) -> Iterator[Row]:
    """How far memory grew, when that was measured."""
    for what in ("save", "restore") if peak else ():
        yield row(name, f"peak of a {what}, states", peak["flaxckpt"][what], peak["Orbax"][what])


def beside_limits(name: str, found: dict[str, Any]) -> Table:
    """Rates of flaxckpt and of the machine, with as many bytes on the same disk in the same run."""
    ours, limit = found["seconds"]["flaxckpt"], found["seconds"]["limits"]
    gigabytes = found["nbytes"] / 1e9
    rows = [
        row(
            name,
            f"{what} / {beside}, GB/s",
            gigabytes / median(ours[what]),
            gigabytes / median(limit[beside]),
        )
        for what, besides in BESIDE.items()
        for beside in besides
    ]
    return Table(f"{name}: limits of the machine", rows, sides=("flaxckpt", "limit"))


def tables(found: dict[str, dict[str, Any]]) -> Iterator[Table]:
    """Two tables a state and layout; one when it is so small that rates say nothing."""
    for name, measured in found.items():
        yield comparison(name, measured)
        if measured["nbytes"] > 1e7:
            yield beside_limits(name, measured)
