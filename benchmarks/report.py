"""What was measured, as Markdown, as a plot and as raw numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import other_tables, plot, state_tables
from benchmarks.sides import DURABILITY
from benchmarks.table import Table

FOLDER = Path(__file__).parent
INTRODUCTION = """# Results

`python -m benchmarks` (`make bench`), {date}: {machine}. {versions}.

Medians of {rounds} rounds; both libraries through their managers with their defaults, in turns in
one process for each state and layout. The first save and restore of each is not counted, and every
save has new arrays, as after a train step (but L, which fills the memory). *save* returns when the
step is committed; *blocked* is what a save in the background keeps its caller waiting, *async save*
the same until it is committed. Times of a restore are until all arrays are ready; before a *cold*
one the files are dropped from the page cache (`sync`, then `posix_fadvise(DONTNEED)` on each).
Before each measurement one and a half times the state's size of memory is touched and freed, as a
virtual machine has to get it from its host first.
Peaks are growths of the resident memory of a process, in sizes of the state; that of a restore has
the result in it. *sharded* is a mesh of 4 x 2 CPU devices, *transposed* one of 2 x 4.

Durability: {durability}
{remark}
![Ratios](results.svg)
"""


def all_tables(results: dict[str, Any]) -> list[Table]:
    """The tables of all that was measured."""
    return [*state_tables.tables(results.get("states", {})), *other_tables.tables(results)]


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    machine = results["machine"]
    remark = f"\n{machine['remark']}\n" if "remark" in machine else ""
    described = {**machine, "remark": remark}
    head = INTRODUCTION.format(**described, rounds=results["rounds"], durability=DURABILITY)
    return "\n".join([head, "\n\n".join(t.markdown() for t in all_tables(results)), ""])


def merged(results: dict[str, Any]) -> dict[str, Any]:
    """`results` and what earlier runs, perhaps of other parts, have in results.json."""
    file = FOLDER / "results.json"
    earlier = json.loads(file.read_text()) if file.exists() else {}
    found = {**earlier, **results}
    for part in {"states", "costs", "growth", "stages"} & earlier.keys() & results.keys():
        found[part] = {**earlier[part], **results[part]}
    return found


def write(results: dict[str, Any]) -> None:
    """Writes RESULTS.md, results.svg and results.json."""
    results = merged(results)
    (FOLDER / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (FOLDER / "RESULTS.md").write_text(markdown(results))
    plot.draw(all_tables(results), FOLDER / "results.svg")
