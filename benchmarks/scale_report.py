"""What scale_model found, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks import scale_states
from benchmarks.table import number
from flaxckpt.saving.save_plan import MAX_SHARDING_DEVICES

Row = dict[str, Any]
# The name of a column, what it shows, and the unit that this is divided by.
Column = tuple[str, str, float]

INTRODUCTION = """# How a checkpoint grows with the processes

`python -m benchmarks.scale_model`, {date}: {machine}. {versions}.
Load average at the start and at the end: {load[0]:.1f}, {load[1]:.1f}. Two cores have to do all of
it, and whatever else is running: times are right to a factor of two, numbers of bytes and requests
do not depend on that.

*Measured*: process 0 is flaxckpt's own code in a process of its own. The other processes are
simulated: each has a real database with a chunk of 1.2 kB of each sharded leaf (one leaf in eight
is replicated, and process 0 writes it), and a real done record. *Real* ones are `jax.distributed`
processes on this one machine. *Computed*: everything in the tables of 8B, 70B and 405B.
"""
SIZES: list[Column] = [
    ("processes", "processes", 1),
    ("leaves", "leaves", 1),
    ("entries", "entries", 1),
]
SIMULATED: list[Column] = [
    *SIZES,
    ("gather, s", "gather_secs", 1),
    ("open, s", "open_secs", 1),
    ("merge, s", "merge_secs", 1),
    ("sizes, s", "sizes_secs", 1),
    ("metadata, s", "metadata_secs", 1),
    ("fsync, s", "fsync_secs", 1),
    ("memory of process 0, MB", "leader_bytes", 1e6),
    ("its requests", "leader_requests", 1),
    ("manifest, B", "manifest_bytes", 1),
    ("nodes, kB", "node_bytes", 1e3),
    ("`_METADATA`, kB", "metadata_bytes", 1e3),
    ("open a restore, s", "opening_secs", 1),
    ("read the index, s", "index_secs", 1),
    ("memory of the index, MB", "index_bytes", 1e6),
]
BUCKETS: list[Column] = [
    *SIZES,
    ("requests of process 0", "leader_requests", 1),
    ("requests to open and read the index", "restore_requests", 1),
    ("objects", "files", 1),
]
REAL: list[Column] = [
    *SIZES,
    ("blocked, ms", "blocked_secs", 1e-3),
    ("save, ms", "save_secs", 1e-3),
    ("open, ms", "open_secs", 1e-3),
    ("merge, ms", "merge_secs", 1e-3),
    ("by the fit", "fitted_merge_secs", 1e-3),
    ("metadata, ms", "metadata_secs", 1e-3),
    ("by the fit", "fitted_metadata_secs", 1e-3),
    ("`_METADATA`, kB", "metadata_bytes", 1e3),
    ("by the fit", "fitted_metadata_bytes", 1e3),
    ("index, ms", "index_secs", 1e-3),
    ("restore, ms", "restore_secs", 1e-3),
]
COMMITS: list[Column] = [
    ("transactions", "transactions", 1),
    ("seconds", "commit_secs", 1),
    ("files", "commit_files", 1),
    ("requests", "commit_requests", 1),
]
DEVICES: list[Column] = [
    ("devices", "devices", 1),
    ("plan of an array, ms", "plan_secs", 1e-3),
    ("its entry in `_sharding`, kB", "sharding_bytes", 1e3),
]
HOW: list[Column] = [("state", "model", 1), ("hosts", "processes", 1)]
SAVES: list[Column] = [
    *HOW,
    ("GB of a host", "host_bytes", 1e9),
    ("save, s", "save_secs", 1),
    ("its data, s", "save_data_secs", 1),
    ("transactions, s", "save_transactions_secs", 1),
    ("merge, s", "save_merge_secs", 1),
    ("other metadata, s", "save_metadata_secs", 1),
    ("slowest beside the data", "save_slowest", 1),
    ("blocked, s", "blocked_secs", 1),
    ("and the first time, s", "plan_secs", 1),
    ("memory of process 0, GB", "leader_bytes", 1e9),
]
RESTORES: list[Column] = [
    *HOW,
    ("chunks and leaves, millions", "entries", 1e6),
    ("restore, s", "restore_secs", 1),
    ("its data, s", "restore_data_secs", 1),
    ("index, s", "restore_index_secs", 1),
    ("slowest beside the data", "restore_slowest", 1),
    ("memory of the index, GB", "index_bytes", 1e9),
    ("`_METADATA`, MB", "metadata_bytes", 1e6),
    ("`_sharding`, MB", "sharding_bytes", 1e6),
    ("done records, MB", "message_bytes", 1e6),
    ("requests of a save, a host", "host_requests", 1),
    ("process 0", "leader_requests", 1),
    ("s for these", "leader_requests_secs", 1),
    ("of a restore, at most, a host", "restore_requests", 1),
]


def cell(value: Any, unit: float) -> str:
    """A value in its unit."""
    if isinstance(value, str):
        return value
    whole = unit == 1 and (isinstance(value, int) or abs(value) >= 1000)
    return number(round(value)) if whole else number(float(value / unit))


def table(title: str, columns: Sequence[Column], rows: Iterable[Row], note: str = "") -> str:
    """Rows below a title and a note."""
    head = [name for name, _, _ in columns]
    body = [[cell(row.get(key, ""), unit) for _, key, unit in columns] for row in rows]
    lines = [f"| {' | '.join(line)} |" for line in (head, ["---:"] * len(head), *body)]
    return "\n\n".join(filter(None, [f"## {title}", note, "\n".join(lines)]))


def formula(fit: dict[str, float]) -> str:
    """The coefficients with what they belong to."""
    parts = [f"{c:.3g}" if n == "1" else f"{c:.3g} x {n}" for n, c in fit.items() if c]
    return " + ".join(parts) or "0"


def fitted(found: Row) -> str:
    """The coefficients of the pieces, and how far those of few processes are off at many."""
    held = found["held_out"]
    rows = [
        {
            "piece": piece,
            "is": formula(fit),
            "off": f"{min(held[piece]):+.0%} to {max(held[piece]):+.0%}" if piece in held else "",
        }
        for piece, fit in found["fits"].items()
    ]
    columns = [("piece", "piece", 1.0), ("is", "is", 1.0), ("held out", "off", 1.0)]
    note = (
        "Least squares of relative errors, without negative coefficients, over all that was "
        f"measured. *Held out*: how far the same fit of up to {found['known']} processes only is "
        "off at those with more."
    )
    return table("The fit", columns, rows, note)


def markdown(found: Row) -> str:
    """The whole report."""
    measured, rates = found["measured"], found["rates"]
    note = "What process 0 does, and what every process of a restore does first."
    real = "The second save of a manager; the restore has been made once."
    parts = [
        INTRODUCTION.format(**found["machine"]).rstrip(),
        *filter(None, [found["machine"].get("remark")]),
        table("Measured: simulated processes", SIMULATED, measured["files"], note),
        table("Measured: simulated processes, to a bucket in memory", BUCKETS, measured["buckets"]),
        table("Measured: real processes", REAL, measured["real"], real),
        table(
            "Measured: the transactions of one process",
            COMMITS,
            measured["commits"],
            "Of five chunks each. Every transaction writes all nodes anew.",
        ),
        table(
            "Measured: the transactions of one process, to a bucket in memory",
            [column for column in COMMITS if column[0] != "seconds"],
            measured["bucket_commits"],
            "A value's object, a node and a manifest in each.",
        ),
        table("Measured: the mesh, in every process", DEVICES, measured["devices"]),
        fitted(found),
    ]
    assumed = (
        "## Assumed\n\n"
        "Bfloat16 params, float32 master params and adam's two moments: 14 bytes a parameter. "
        "Eight devices and one process a host; every matrix is spread over all devices. Of a "
        f"host: it writes {rates['write']:g} GB/s, reads {rates['read']:g} GB/s, gets "
        f"{rates['copy']:g} GB/s from its devices; a bucket answers in {rates['latency']:g} ms.\n\n"
        "The first save works out who holds what for each pair of a sharding and a shape: "
        f"{scale_states.MATRIX_PAIRS} of matrices (q; o; k and v; gate and up; down; the "
        "embedding; the head), and one of the scales of norms, two with scanned layers. "
        f"`_sharding` is left out where leaves times devices are more than "
        f"{MAX_SHARDING_DEVICES:,}; the tables have 0 there."
    )
    parts.append(assumed)
    for title, rows in found["predictions"].items():
        parts.append(table(f"Computed: saves, {title}", SAVES, rows))
        parts.append(table(f"Computed: restores, {title}", RESTORES, rows))
    return "\n\n".join(parts) + "\n"
