"""What each measurement is to reach, by its table and its row."""

from __future__ import annotations

from benchmarks.table import Row, Target

BESIDE_ORBAX = {
    ("S single", "save, ms"): 1 / 8,
    ("S single", "blocked, ms"): 1 / 8,
    ("S single", "restore, ms"): 1 / 8,
    ("K single", "save, ms"): 1 / 40,
    ("K single", "blocked, ms"): 1 / 40,
    ("K single", "restore, ms"): 1 / 25,
    ("M single", "save, ms"): 1 / 2,
    ("M single", "blocked, ms"): 1 / 8,
    ("M single", "restore, ms"): 1 / 4,
    ("L single", "save, ms"): 1 / 4,
    ("L single", "blocked, ms"): 1 / 2,
    ("L single", "restore, ms"): 1 / 8,
    ("M sharded", "save, ms"): 1 / 3,
    ("M sharded", "blocked, ms"): 1 / 8,
    ("M sharded", "restore, ms"): 1 / 4,
    ("M sharded", "restore, transposed mesh, ms"): 1 / 3,
}

BESIDE_A_LIMIT = {
    ("M single", "save / dd conv=fsync, GB/s"): 0.8,
    ("M single", "restore, cold / cold read by dd, GB/s"): 0.8,
    ("L single", "save / dd conv=fsync, GB/s"): 0.8,
    ("L single", "restore, cold / cold read by dd, GB/s"): 0.8,
    ("L single", "restore / warm read, 2 threads, GB/s"): 0.3,
}

# The peak of a restore has the result in it: 1.25 is the result and a quarter.
AT_MOST = {
    ("S single", "files"): 6,
    ("K single", "peak of a save, states"): 1,
    ("K single", "peak of a restore, states"): 2,
    ("M single", "peak of a save, states"): 0.1,
    ("M single", "peak of a restore, states"): 1.25,
    ("L single", "peak of a save, states"): 0.05,
    ("L single", "peak of a restore, states"): 1.1,
    ("Fresh process", "import, ms"): 150,
    ("Train loop", "lost by checkpoints, %"): 3,
}

TARGETS = {
    **{key: Target(limit) for key, limit in BESIDE_ORBAX.items()},
    **{key: Target(limit, at_least=True) for key, limit in BESIDE_A_LIMIT.items()},
    **{key: Target(limit, of="value") for key, limit in AT_MOST.items()},
}


def row(table: str, what: str, ours: float, other: float) -> Row:
    """A row with its target."""
    return Row(what, ours, other, TARGETS.get((table, what)))
