"""Memory as a measurement wants it: files out of the page cache, and pages that are there."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np


def files(path: Path) -> list[Path]:
    """`path` when it is a file, otherwise all files below it."""
    return [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]


def touch(nbytes: int) -> None:
    """Makes sure that so much memory can be had at its usual price, and frees it.

    A virtual machine gets a page from its host when it is written to for the first time, which
    takes ten times as long as any later use; whoever came first would pay for all.
    """
    np.empty(nbytes, np.uint8)[::4096] = 1


def drop(path: Path) -> None:
    """Makes the next read of these files come from the disk: only clean pages can be dropped."""
    os.sync()
    for file in files(path):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
