"""Files out of the page cache, without root."""

from __future__ import annotations

import os
from pathlib import Path


def files(path: Path) -> list[Path]:
    """`path` when it is a file, otherwise all files below it."""
    return [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]


def drop(path: Path) -> None:
    """Makes the next read of these files come from the disk: only clean pages can be dropped."""
    os.sync()
    for file in files(path):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
