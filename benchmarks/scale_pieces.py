"""The pieces of a checkpoint of many processes, measured with processes that are not there.

Process 0 is real: it runs flaxckpt's own code in a process of its own. The others are one child
that writes, for each of them, a real database with a chunk of each leaf and a real done record.
No device is used, and the chunks are as small as any that gets into a data file.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
import orjson
import tensorstore as ts

from benchmarks import peak, process
from benchmarks.stopwatch import timed
from flaxckpt.leaves.dtypes import storage_of
from flaxckpt.metadata.step_metadata import CheckpointMetadata
from flaxckpt.multihost import ProcessGroup
from flaxckpt.options import Options
from flaxckpt.saving import save_plan, writing
from flaxckpt.saving.contents import WholeTree
from flaxckpt.saving.save_plan import SavePlan, make_plan
from flaxckpt.saving.snapshot import HostShard
from flaxckpt.saving.writing import PreparedSave, ProcessManifest, TreeManifest
from flaxckpt.sharding.chunks import Region, whole
from flaxckpt.source.checkpoint import open_checkpoint
from flaxckpt.store import layout, ocdbt, zarr3
from flaxckpt.store.key_values import StorageKeyValueStore
from flaxckpt.store.locate import locate
from flaxckpt.store.ocdbt import ValueRef, read_index
from flaxckpt.store.store import Location

Point = dict[str, float]

# A chunk is just larger than what lies in the nodes of the B-tree.
FLOATS = 300
# Every so many-th leaf is replicated, so that process 0 writes it.
REPLICATED = 8
# The steps of process 0 after its own part of the arrays is written.
STAGES = {
    "gather": "flaxckpt.multihost.Collective.gather",
    "compare": "flaxckpt.saving.writing.check_equal",
    "open": "flaxckpt.store.ocdbt.open_store",
    "merge": "flaxckpt.store.ocdbt.merge",
    "sizes": "flaxckpt.saving.writing.files_of",
    "metadata": "flaxckpt.saving.writing._write_metadata",
    "fsync": "flaxckpt.store.local.fsync_directories",
}
# TensorStore's counters of what it asked of files and of servers.
COUNTERS = (
    *(f"/tensorstore/kvstore/file/{name}" for name in ("read", "batch_read", "write", "list")),
    "/tensorstore/http/request_completed",
)


def requests() -> int:
    """What this process has asked of files and of servers, so far."""
    found = ts.experimental_collect_matching_metrics("/tensorstore/")
    metrics = {metric["name"]: metric["values"] for metric in found}
    return sum(int(v["value"]) for name in COUNTERS for v in metrics.get(name, ()))


class _SimulatedProcesses(StorageKeyValueStore):
    """The keys of process 0; when it sets `begun`, the others do their parts."""

    def __init__(self, kvstore: ts.KvStore, others: Callable[[dict[str, Any], str], None]):
        super().__init__(kvstore)
        self._others = others

    def set(self, key: str, value: str) -> None:
        """See `KeyValueStore`."""
        super().set(key, value)
        prefix, _, name = key.rpartition("/")
        if name == "begun" and "value" in (begun := orjson.loads(value)):
            self._others(begun, prefix)


def tree(processes: int, leaves: int) -> dict[str, Any]:
    """A state of which each process has a row of most leaves."""
    row = np.broadcast_to(np.float32(0), (processes, FLOATS))
    return {
        "opt_state": {
            f"layers_{n:04d}": {"mu": {"kernel": row if n % REPLICATED else row[0]}}
            for n in range(leaves)
        }
    }


def _plan(processes: int, leaves: int, index: int) -> SavePlan:
    """What process `index` saves of the state."""

    def held(array: np.ndarray, process: int | None) -> Iterator[tuple[int, Region, Any]]:
        del process
        everything, share = whole(array.shape), save_plan._Replica(0, 1)
        if array.ndim == 2:
            yield 0, Region((index, 0), (1, FLOATS)), share
        elif index == 0:
            yield 0, everything, share

    state = tree(processes, leaves)
    with mock.patch.object(save_plan, "_held", held):
        return make_plan(state, jax.tree.structure(state), 4 * FLOATS)[0]


def _pieces(plan: SavePlan, index: int) -> Iterator[HostShard]:
    """What process `index` writes: its own number, everywhere."""
    for array, shard in plan.shards:
        yield HostShard(array, shard.chunks, shard.region, np.full(shard.region.shape, index, "f4"))


def write_others(told: tuple[Any, ...], processes: int, leaves: int) -> int:
    """Writes the databases and the done records of all processes but 0; returns their bytes."""
    url, directory, prefix, attempt, digest, begun = told
    options = Options(fsync=False)
    item, location = locate(url, options) / layout.ITEM, locate(directory, options)
    key_values = StorageKeyValueStore(location.store.kvstore(location))
    chunk, storage, written = (1, FLOATS), storage_of("float32"), 0
    stores = [a.stored.store for a, s in _plan(processes, leaves, 1).shards if s.chunks]
    for index in range(1, processes):
        name = f"{layout.CHILD}{index}-{attempt}"
        child = item / name
        child.store.make_directory(child)
        value = zarr3.encode_chunk(np.full(chunk, index, "f4"), chunk, storage)
        items = ((zarr3.chunk_key(store, (index, 0)), value) for store in stores)
        store = ocdbt.create_store(child, ts.Context(), numbered=not child.store.can.rewrites)
        ocdbt.write_all(store, items, options.buffer_bytes)
        files = {f"{name}/{file}": found.size for file, found in writing.files_of(child).items()}
        part = ProcessManifest([TreeManifest(digest, {}, files, is_written=True)], {}, {}).to_json()
        message = orjson.dumps(begun | {"value": part}).decode()
        written += len(message)
        key_values.set(f"{prefix}/arrived/{index}", message)
    return written


def lead(url: str, processes: int, leaves: int) -> Point:
    """What process 0 of so many does for a save of so many leaves."""
    options = Options(chunk_bytes=4 * FLOATS)
    final, attempt = locate(url, options), layout.new_attempt()
    final.store.prepare(final.parent)
    plan, directory = _plan(processes, leaves, 0), final.parent / f"notes-{uuid.uuid4().hex}"
    described = CheckpointMetadata(attempt, 0, 0, {}, {})
    found: dict[str, Any] = {}

    def others(begun: dict[str, Any], prefix: str) -> None:
        checkpoint = str(final.parent / begun["value"])
        told = (checkpoint, str(directory), prefix, attempt, writing.digest(plan), begun)
        found["message_bytes"] = process.call(write_others, told, processes, leaves)

    key_values = _SimulatedProcesses(directory.store.kvstore(directory), others)
    collective = ProcessGroup(0, processes, key_values, 600.0).collective(f"saving {final}")
    job = PreparedSave(WholeTree(layout.ITEM, plan), final, described, False, options)
    before = requests()
    with timed(STAGES) as seconds:
        memory = peak.growth(lambda: writing.write(job, _pieces(plan, 0), collective))
    found |= {f"{stage}_secs": seconds[stage] for stage in STAGES}
    found |= {"leader_bytes": memory, "leader_requests": requests() - before}
    return found | sizes(final)


def sizes(final: Location) -> Point:
    """The sizes of what process 0 wrote."""
    item = final / layout.ITEM
    names = item.store.names(item)
    nodes = [name for name in names if name.startswith("d/")]
    read = {name: len((item / name).read()) for name in nodes}
    return {
        "files": len(names),
        "node_bytes": sum(read.values()),
        "manifest_bytes": len((item / layout.MANIFEST).read()),
        "metadata_bytes": len((item / layout.TREE_METADATA).read()),
    }


def read(url: str) -> Point:
    """What every process of a restore does before it reads its own arrays."""
    found: dict[str, Any] = {}
    before, start = requests(), time.perf_counter()
    open_checkpoint(url)
    opened = time.perf_counter() - start

    def look() -> None:
        began = time.perf_counter()
        found["index"] = read_index(locate(url, Options()) / layout.ITEM)
        found["seconds"] = time.perf_counter() - began

    memory = peak.growth(look)
    places = [place for place in found["index"].values() if isinstance(place, ValueRef)]
    return {
        "entries": len(found["index"]),
        "chunks": len(places),
        "opening_secs": opened,
        "index_secs": found["seconds"],
        "index_bytes": memory,
        "restore_requests": requests() - before,
    }


def simulate(parent: str, processes: int, leaves: int) -> Point:
    """Saves as so many processes, and opens what was saved; all that was measured."""
    url = f"{parent}/0"
    # Each of the others writes a manifest and a data file, to a directory.
    others = {"other_files": 2 * (processes - 1)}
    point: Point = {"processes": processes, "leaves": leaves} | others
    return point | process.call(lead, url, processes, leaves) | process.call(read, url)
