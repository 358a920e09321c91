"""The state of the simulated processes, saved and restored by real ones: `jax.distributed`."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import flaxckpt
from benchmarks import scale_pieces
from benchmarks.scale_pieces import Point
from benchmarks.stopwatch import timed

RESULT = "result.json"
RUN = "run"


def measure(directory: Path, processes: int, leaves: int) -> Point:
    """What process 0 of so many took for a save, and how long a restore took."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.scale_real", str(directory)]
    numbers = [[str(n) for n in (processes, leaves, port, i)] for i in range(processes)]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    env.pop("XLA_FLAGS", None)
    started = [subprocess.Popen([*command, *arguments], env=env) for arguments in numbers]
    codes = [one.wait(600) for one in started]
    if any(codes):
        raise RuntimeError(f"a process of {processes} failed")
    found = json.loads((directory / RESULT).read_text())
    return found | scale_pieces.read(str(directory / RUN / "1"))


def join(processes: int, port: int, index: int) -> None:
    """Makes this process one of so many."""
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(
        address,
        processes,
        index,
        cluster_detection_method="deactivate",
        coordinator_bind_address=address,
    )


def state(processes: int, leaves: int) -> Any:
    """The state of the simulated processes, on one device of each real one."""
    mesh = Mesh(np.array(jax.devices()), ("data",))

    def make(like: np.ndarray) -> jax.Array:
        spec = PartitionSpec("data") if like.ndim == 2 else PartitionSpec()
        where = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(like.shape, where, lambda index: like[index])

    return jax.tree.map(make, scale_pieces.tree(processes, leaves))


def main() -> None:
    """One process: the second save counts, for the first makes the plan."""
    logging.disable(logging.WARNING)
    directory, (processes, leaves, port, index) = Path(sys.argv[1]), map(int, sys.argv[2:])
    join(processes, port, index)
    tree = state(processes, leaves)
    options = flaxckpt.Options(chunk_bytes=4 * scale_pieces.FLOATS)
    with flaxckpt.CheckpointManager(directory / RUN, options=options) as manager:
        manager.save(0, tree, wait=True)
        with timed(scale_pieces.STAGES) as seconds:
            began = time.perf_counter()
            manager.save(1, tree)
            blocked = time.perf_counter() - began
            manager.wait()
            saved = time.perf_counter() - began
        began = time.perf_counter()
        jax.block_until_ready(manager.restore(tree))
        restored = time.perf_counter() - began
    if index == 0:
        found = {f"{stage}_secs": seconds[stage] for stage in scale_pieces.STAGES}
        found |= {"processes": processes, "leaves": leaves, "blocked_secs": blocked}
        found |= {"save_secs": saved, "restore_secs": restored}
        found |= scale_pieces.sizes(directory / RUN / "1")
        (directory / RESULT).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
