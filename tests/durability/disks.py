"""Disks for one test: small ones, and ones whose power can be cut. They need root."""

import contextlib
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

MIB = 1 << 20
# The smallest image that mkfs accepts, and a bit.
SIZES = {"ext4": 64 * MIB, "xfs": 320 * MIB}
MKFS = {"ext4": ["mkfs.ext4", "-q", "-F"], "xfs": ["mkfs.xfs", "-q", "-f"]}
# A copy of an xfs that is mounted has the same id.
MOUNT_OPTIONS = {"ext4": "loop", "xfs": "loop,nouuid"}


def need(*tools):
    """Skips the test where disks cannot be made."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a disk")
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")


def call(*command):
    """Runs a command; its errors are part of the exception."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")


@contextlib.contextmanager
def mounted(where, *arguments):
    """Mounts something at the directory `where`, which is created, during the block."""
    where = Path(where)
    where.mkdir()
    call("mount", *arguments, where)
    try:
        yield where
    finally:
        unmount(where)


def unmount(where):
    """Unmounts; a process that was just killed may hold files open for a moment."""
    for _ in range(50):
        with contextlib.suppress(OSError):
            call("umount", where)
            return
        time.sleep(0.1)
    call("umount", "--lazy", where)
    raise OSError(f"{where} was still in use after 5 s")


@contextlib.contextmanager
def tmpfs(where, size, inodes=0):
    """A disk in memory of so many bytes (and inodes); skips where that is not allowed."""
    need("mount", "umount")
    options = f"size={size},nr_inodes={inodes}"
    with contextlib.ExitStack() as stack:
        try:
            disk = stack.enter_context(mounted(where, "-t", "tmpfs", "-o", options, "tmpfs"))
        except OSError as error:
            pytest.skip(f"no tmpfs can be mounted here: {error}")
        yield disk


@contextlib.contextmanager
def image(file, kind, where):
    """A disk of the file system `kind` in a new image `file`; skips where that cannot be."""
    need("mount", "umount", "losetup", MKFS[kind][0])
    with open(file, "xb") as sparse:
        sparse.truncate(SIZES[kind])
    call(*MKFS[kind], file)
    with contextlib.ExitStack() as stack:
        try:
            disk = stack.enter_context(mounted(where, "-o", "loop", "-t", kind, file))
        except OSError as error:
            pytest.skip(f"no image with {kind} can be mounted here: {error}")
        yield disk


def cut_power(file, copy):
    """A copy of the image `file` with what has reached it by now; what is in memory is lost."""
    call("cp", "--sparse=always", "--reflink=auto", file, copy)


@contextlib.contextmanager
def after_power_cut(copy, kind, where):
    """Mounts a copy made by `cut_power`; the file system replays its journal."""
    with mounted(where, "-o", MOUNT_OPTIONS[kind], "-t", kind, copy) as disk:
        yield disk
    os.unlink(copy)
    os.rmdir(where)
