"""Where the time of a save and of a restore goes, function by function.

A function's time has that of those it calls in it. Threads run side by side, so times may add up
to more than the whole.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

from benchmarks import layouts, states
from benchmarks.sides import FlaxckptSide
from benchmarks.stopwatch import Seconds, timed
from benchmarks.timing import restore_seconds, save_seconds

STATES = ("S", "K", "L")
SAVE = {
    "take the state apart": "flaxckpt.saving.save.plan_tree",
    "hold its values": "flaxckpt.run.writer.hold",
    "write the values": "flaxckpt.store.ocdbt.write_all",
    "- encode chunks": "flaxckpt.store.zarr3.encode_chunk",
    "- wait for TensorStore": "flaxckpt.store.ocdbt._finish",
    "write the metadata": "flaxckpt.store.local.write_file",
    "fsync the directories": "flaxckpt.store.local.fsync_path",
}
RESTORE = {
    "open": "flaxckpt.run.restore_step.open_checkpoint",
    "match with the target": "flaxckpt.restoring.restore.with_target",
    "read the leaves": "flaxckpt.restoring.restore.read_leaves",
    "- list the index": "flaxckpt.source.checkpoint.read_index",
    "- read, check": "flaxckpt.source.chunk_reads.finish_span",
    "- put on the device": "flaxckpt.restoring.placement.to_devices",
}


def measure(state: str, rounds: int, quick: bool) -> dict[str, Seconds]:
    """The medians of every stage of a save and of a restore."""
    target = layouts.target(states.abstract(state, quick=quick), "single")
    tree = states.fill(target)
    found: dict[str, dict[str, list[float]]] = {
        "save": defaultdict(list),
        "restore": defaultdict(list),
    }
    with tempfile.TemporaryDirectory() as directory:
        run = FlaxckptSide(Path(directory))
        for step in range(rounds + 2):
            tree = tree if state == "L" else states.advance(tree)
            os.sync()
            with timed(SAVE) as stages:
                stages["all"] = save_seconds(run, step, tree)[1]
            note(found["save"], SAVE, stages)
            with timed(RESTORE) as stages:
                stages["all"] = restore_seconds(run, step, target)
            note(found["restore"], RESTORE, stages)
            run.delete(step)
    return {what: {s: median(t[2:]) for s, t in by.items()} for what, by in found.items()}


def note(found: dict[str, list[float]], names: dict[str, str], stages: Seconds) -> None:
    """Appends the seconds of one round."""
    for stage in ("all", *names):
        found[stage].append(stages[stage])
