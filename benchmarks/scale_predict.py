"""What a save and a restore of a large state take, computed from the fitted pieces."""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmarks import scale_states
from benchmarks.scale_fit import Fit, value
from benchmarks.scale_states import Layout, Model
from flaxckpt.saving.save_plan import MAX_SHARDING_DEVICES

GB = 1e9


class Rates(NamedTuple):
    """What nobody but the user knows: of one host, and of the store.

    Attributes:
      write: GB/s that it writes.
      read: GB/s that it reads.
      copy: GB/s that come from its devices.
      latency: milliseconds until a bucket answers.
    """

    write: float = 1.0
    read: float = 1.0
    copy: float = 20.0
    latency: float = 50.0


# So many requests to a bucket are under way at once.
CONNECTIONS = 32


def predict(model: Model, how: Layout, fitted: dict[str, Fit], rates: Rates) -> dict[str, float]:
    """What a save and a restore take, in seconds, bytes and requests."""
    point = scale_states.count(model, how)
    per_host = value(fitted["commit_files"], point)
    point["files"] = point["processes"] * per_host
    point["other_files"] = (point["processes"] - 1) * per_host
    found = {name: value(fit, point) for name, fit in fitted.items()}
    moved = point["host_bytes"] / GB
    metadata = sum(found[f"{n}_secs"] for n in ("gather", "open", "sizes", "metadata", "fsync"))
    written = found["bucket_commit_requests"]
    asked = found["bucket_leader_requests"] + written
    has_sharding = point["leaves"] * point["devices"] <= MAX_SHARDING_DEVICES
    save = {
        "data_secs": moved / rates.write,
        "transactions_secs": found["commit_secs"],
        "merge_secs": found["merge_secs"],
        "metadata_secs": metadata,
    }
    restore = {
        "data_secs": moved / rates.read,
        "index_secs": found["index_secs"],
        "opening_secs": found["opening_secs"],
    }
    return point | {
        "plan_secs": found["plan_secs"] * point["pairs"],
        "blocked_secs": moved / rates.copy,
        "save_secs": sum(save.values()),
        "restore_secs": sum(restore.values()),
        **{f"save_{name}": seconds for name, seconds in save.items()},
        **{f"restore_{name}": seconds for name, seconds in restore.items()},
        "leader_requests": asked,
        "leader_requests_secs": asked * rates.latency / 1000 / CONNECTIONS,
        "host_requests": written + found["bucket_restore_requests"],
        # At most: small chunks that lie side by side are read at once.
        "restore_requests": (point["entries"] - point["leaves"]) / point["processes"]
        + found["bucket_restore_requests"],
        "leader_bytes": found["leader_bytes"],
        "index_bytes": found["index_bytes"],
        "message_bytes": found["message_bytes"],
        "metadata_bytes": found["metadata_bytes"],
        "sharding_bytes": found["sharding_bytes"] * point["leaves"] if has_sharding else 0.0,
    }


BOTTLENECKS = {
    "save": ("transactions", "merge", "metadata"),
    "restore": ("index", "opening"),
}


def bottleneck(row: dict[str, float], what: str) -> tuple[str, float]:
    """What of a save or a restore takes longest beside the data, and how many times as long."""
    name = max(BOTTLENECKS[what], key=lambda name: row[f"{what}_{name}_secs"])
    return name, row[f"{what}_{name}_secs"] / row[f"{what}_data_secs"]


def slowest_of(row: dict[str, float], what: str) -> str:
    """`bottleneck`, for people."""
    name, times = bottleneck(row, what)
    return f"{name}: {times:.2g} x data"


LAYOUTS = {
    "one array for each layer's matrix": (False, scale_states.CHUNK_BYTES),
    "scanned layers": (True, scale_states.CHUNK_BYTES),
    "scanned layers, chunk_bytes=64 MiB": (True, 8 * scale_states.CHUNK_BYTES),
}


def predictions(fitted: dict[str, Fit], rates: Rates) -> dict[str, list[dict[str, Any]]]:
    """A table for each way to lay a state out."""
    found: dict[str, list[dict[str, Any]]] = {}
    for title, (scanned, chunk_bytes) in LAYOUTS.items():
        for name, model in scale_states.MODELS.items():
            for hosts in scale_states.HOSTS:
                row = predict(model, Layout(hosts, scanned, chunk_bytes), fitted, rates)
                slowest = {f"{what}_slowest": slowest_of(row, what) for what in BOTTLENECKS}
                found.setdefault(title, []).append({"model": name, **row, **slowest})
    return found
