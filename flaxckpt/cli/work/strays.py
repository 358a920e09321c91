"""What lies in the directory of a run and is no committed step of it. It needs no jax."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from pathlib import Path
from typing import NamedTuple

from flaxckpt.storage import filesystem, layout, marker
from flaxckpt.storage.bucket import BucketPath
from flaxckpt.storage.location import Location


class Stray(NamedTuple):
    """Something that is no step.

    Attributes:
      name: what it is called.
      unfinished: what is known of a checkpoint that is not committed; empty for what is foreign.
    """

    name: str
    unfinished: str = ""


def strays(directory: Location, steps: Container[str]) -> list[Stray]:
    """All that is in `directory` beside `steps`, the names of the committed steps."""
    if isinstance(directory, Path):
        found = _on_disk(directory, steps)
    else:
        found = _in_bucket(directory, steps)
    return sorted(stray for stray in found if stray.name != layout.CLAIMS)


def _on_disk(directory: Path, steps: Container[str]) -> Iterator[Stray]:
    """As `strays`, in a directory."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name in steps:
                continue
            path = directory / entry.name
            unfinished = layout.parse_temporary(entry.name)
            if unfinished is None and entry.is_dir(follow_symlinks=False):
                unfinished = marker.unfinished(path)
            yield Stray(entry.name, "" if unfinished is None else _writer(path, unfinished[1]))


def _writer(path: Path, host: str) -> str:
    """Who writes an unfinished checkpoint, as far as that can be seen from here."""
    if host != layout.host_name():
        return f"of {host}, which may be writing it"
    try:
        return "being written" if filesystem.is_locked(path) else "its writer is gone"
    except OSError:
        return "gone meanwhile, or not to be read"


def _in_bucket(directory: BucketPath, steps: Container[str]) -> Iterator[Stray]:
    """As `strays`, in a bucket."""
    names = directory.names()
    claims = {n.partition("/")[2] for n in names if n.startswith(f"{layout.CLAIMS}/")}
    others = {name.partition("/")[0] for name in names} - claims
    for name in claims:
        if name not in steps:
            yield Stray(name, _claim(directory / layout.CLAIMS / name))
    for name in others:
        if name not in steps:
            yield Stray(name, _left_by(name))


def _claim(claim: BucketPath) -> str:
    """What the claim to a step says."""
    state = (claim.read() or b"").decode(errors="replace").partition(" ")[2]
    words = {"writing": "being written, or its writer is gone", "removing": "being removed"}
    return words.get(state, "damaged")


def _left_by(name: str) -> str:
    """What is known of objects of flaxckpt's that are no step."""
    is_ours = name.startswith(layout.PROBE) or layout.parse_temporary(name) is not None
    return "left by a process, or in use" if is_ours else ""
