"""What the machine can do with as many bytes as a state has, on the disk it is saved to."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import page_cache
from benchmarks.timing import seconds

BLOCK = 64 << 20
WARM = {"warm read, 1 thread": 1, "warm read, 2 threads": 2}  # how many threads read


def dd(*operands: str) -> None:
    """Runs dd in blocks of 64 MiB."""
    subprocess.run(["/bin/dd", "bs=64M", "status=none", *operands], check=True)


def read_warm(file: Path, threads: int) -> np.ndarray:
    """The bytes of `file` in memory that was never touched before."""
    array = np.empty(file.stat().st_size, np.uint8)
    descriptor = os.open(file, os.O_RDONLY)

    def read(start: int) -> None:
        os.preadv(descriptor, [array[start : start + BLOCK]], start)

    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read, range(0, array.size, BLOCK)))
    finally:
        os.close(descriptor)
    return array


def measure(directory: Path, nbytes: int) -> dict[str, float]:
    """Seconds of one write and of reads, sequential, of a file with `nbytes`."""
    file = directory / "limit"
    os.sync()
    write = [f"of={file}", f"count={nbytes}", "iflag=count_bytes", "conv=fsync"]
    found = {"dd conv=fsync": seconds(lambda: dd("if=/dev/zero", *write))}
    for what, threads in WARM.items():
        page_cache.touch(nbytes)
        found[what] = seconds(partial(read_warm, file, threads))
    page_cache.drop(file)
    found["cold read by dd"] = seconds(lambda: dd(f"if={file}", "of=/dev/null"))
    file.unlink()
    return found
