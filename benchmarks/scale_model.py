"""How a checkpoint grows with the processes: measures pieces, fits them, computes what is larger.

    python -m benchmarks.scale_model [--quick] [--write 1.0] [--read 1.0] [--copy 20] [--latency 50]

Writes SCALING.md and scaling.json, in some ten minutes; with --quick only prints, in one or two.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from benchmarks import (
    machine,
    process,
    scale_fit,
    scale_parts,
    scale_pieces,
    scale_real,
    scale_report,
)
from benchmarks.scale_fit import Fit, Point, value
from benchmarks.scale_predict import Rates, predictions

FOLDER = Path(__file__).parent
# What is compared between real processes and the fit of simulated ones.
COMPARED = ("merge_secs", "metadata_secs", "metadata_bytes")


class Plan(NamedTuple):
    """What is measured: numbers of processes and of leaves, of transactions, of devices.

    Attributes:
      files: in directories; those with more processes than `known` are held out.
      buckets: likewise, in a bucket.
      real: with real processes.
      commits: transactions of one process.
      bucket_commits: likewise, in a bucket.
      devices: in a mesh.
      known: the most processes that are fitted to.
    """

    files: list[tuple[int, int]]
    buckets: list[tuple[int, int]]
    real: list[tuple[int, int]]
    commits: list[int]
    bucket_commits: list[int]
    devices: list[int]
    known: int


FULL = Plan(
    [(p, n) for p in (2, 8, 64) for n in (100, 300, 1000)]
    + [(64, 2000), (512, 100), (512, 300), (512, 1000), (4096, 100), (4096, 200)],
    [(2, 50), (8, 50), (8, 200), (64, 50), (512, 50)],
    [(p, 300) for p in (1, 2, 4, 8)],
    [50, 200, 800, 2400],
    [10, 40, 160],
    [64, 512, 4096],
    64,
)
QUICK = Plan(
    [(2, 8), (4, 40), (8, 8), (16, 40)], [(2, 8), (8, 8)], [(2, 8)], [5, 20], [5], [8, 64], 8
)


def measure(plan: Plan) -> dict[str, Any]:
    """Everything that `plan` names."""
    with tempfile.TemporaryDirectory() as directory:
        folders = (Path(directory, str(n)) for n in range(1000))
        simulated, commits = _in_buckets(plan)
        return {
            "files": [_simulated(next(folders), p, n) for p, n in plan.files],
            "buckets": simulated,
            "bucket_commits": commits,
            "real": [_real(next(folders), p, n) for p, n in plan.real],
            "commits": [_committed(next(folders), n) for n in plan.commits],
            "devices": [process.call(scale_parts.plan, n, devices=n) for n in plan.devices],
        }


def _simulated(folder: Path, processes: int, leaves: int) -> Point:
    """Simulated processes that save to a directory."""
    folder.mkdir()
    found = scale_pieces.simulate(str(folder), processes, leaves)
    print(f"{processes} simulated processes, {leaves} leaves", flush=True)
    return found


def _in_buckets(plan: Plan) -> tuple[list[Point], list[Point]]:
    """Simulated processes, and transactions, in the tests' GCS, whose times say nothing."""
    from tests.gcs_server import GcsServer

    with GcsServer() as server, mock.patch.dict(os.environ, server.env):
        simulated = [scale_pieces.simulate(f"gs://bkt/{p}-{n}", p, n) for p, n in plan.buckets]
        return simulated, [scale_parts.commits(f"gs://bkt/{n}", n) for n in plan.bucket_commits]


def _real(folder: Path, processes: int, leaves: int) -> Point:
    """Real processes that save to a directory."""
    folder.mkdir()
    found = scale_real.measure(folder, processes, leaves)
    print(f"{processes} real processes", flush=True)
    return found


def _committed(folder: Path, transactions: int) -> Point:
    """One process's database."""
    folder.mkdir()
    found = scale_parts.commits(str(folder), transactions)
    print(f"{transactions} transactions", flush=True)
    return found


def fits(measured: dict[str, Any]) -> dict[str, Fit]:
    """The coefficients of all pieces; `bucket_...` are those of a bucket."""
    found = scale_fit.fit_all([*measured["files"], *measured["commits"], *measured["devices"]])
    in_bucket = scale_fit.fit_all([*measured["buckets"], *measured["bucket_commits"]])
    return found | {f"bucket_{n}": in_bucket[n] for n in in_bucket if n.endswith("_requests")}


def held_out(points: list[Point], known: int) -> dict[str, list[float]]:
    """How far a fit of at most `known` processes is off at those with more, for each piece."""
    few = [point for point in points if point["processes"] <= known]
    many = [point for point in points if point["processes"] > known]
    pieces = [piece for piece in scale_fit.FORMS if piece in points[0]]
    return {piece: scale_fit.errors(piece, few, many) for piece in pieces}


def results(plan: Plan, rates: Rates) -> dict[str, Any]:
    """All that is measured and computed."""
    load = [os.getloadavg()[0]]
    measured = measure(plan)
    load.append(os.getloadavg()[0])
    return computed(measured, rates, plan.known, machine.describe() | {"load": load})


def computed(
    measured: dict[str, Any], rates: Rates, known: int, machine: dict[str, Any]
) -> dict[str, Any]:
    """What was measured, with all that follows from it."""
    fitted = fits(measured)
    for point in measured["real"]:
        for piece in COMPARED:
            if point[piece]:  # one process does not merge
                point[f"fitted_{piece}"] = value(fitted[piece], point)
    return {
        "machine": machine,
        "rates": rates._asdict(),
        "known": known,
        "measured": measured,
        "fits": fitted,
        "held_out": held_out(measured["files"], known),
        "predictions": predictions(fitted, rates),
    }


def main() -> None:
    """Measures, fits, and writes or prints the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale_model", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small numbers; writes nothing")
    for name, default in Rates()._asdict().items():
        parser.add_argument(f"--{name}", type=float, default=default)
    chosen = vars(parser.parse_args())
    quick = chosen.pop("quick")
    found = results(QUICK if quick else FULL, Rates(**chosen))
    text = scale_report.markdown(found)
    if not quick:
        (FOLDER / "scaling.json").write_text(json.dumps(found, indent=1) + "\n")
        (FOLDER / "SCALING.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
