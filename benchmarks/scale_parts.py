"""What one process of many does by itself, measured: its transactions, and its plan of the mesh."""

from __future__ import annotations

import time

import jax
import numpy as np
import orjson
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.scale_pieces import FLOATS, Point, requests
from flaxckpt.metadata import orbax_metadata
from flaxckpt.options import Options
from flaxckpt.saving import save_plan
from flaxckpt.store import ocdbt
from flaxckpt.store.locate import locate

# The chunks of 8 MiB that one transaction has.
KEYS = 5
ARRAYS = 8
VALUE = bytes(4 * FLOATS + 4)


def commits(url: str, count: int) -> Point:
    """One process's database, written in so many transactions of few chunks."""
    directory = locate(url, Options(fsync=False))
    items = (
        (f"opt_state.layers_{n // 8:05d}.kernel/c/{n % 8}/0", VALUE) for n in range(count * KEYS)
    )
    before, start = requests(), time.perf_counter()
    numbered = not directory.store.can.rewrites
    store = ocdbt.create_store(directory, ts.Context(), numbered=numbered)
    ocdbt.write_all(store, items, 2 * KEYS * len(VALUE))
    return {
        "transactions": count,
        "rewritten": count * count * KEYS / 2,
        "commit_secs": time.perf_counter() - start,
        "commit_files": len(directory.store.names(directory)),
        "commit_requests": requests() - before,
    }


def plan(devices: int) -> Point:
    """What every process works out, once, of a shape and a sharding over so many devices."""
    mesh = Mesh(np.array(jax.devices()).reshape(-1, 8), ("fsdp", "tensor"))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
    work_out = save_plan._holders.__wrapped__  # without what it keeps
    work_out(sharding, (devices, 8))  # what jax knows of a shape it keeps
    start = time.perf_counter()
    for _ in range(ARRAYS):
        work_out(sharding, (devices, 8))
    seconds = (time.perf_counter() - start) / ARRAYS
    encoded = orjson.dumps(orbax_metadata.sharding_file({"opt_state.layers_000.kernel": sharding}))
    return {"devices": devices, "plan_secs": seconds, "sharding_bytes": len(encoded)}
