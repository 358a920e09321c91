"""Checkpoints of `clu.checkpoint`: `ckpt-{n}.flax` beside TensorFlow's files."""

from __future__ import annotations

import re
from typing import Any

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.formats import flax_msgpack
from flaxckpt.store.store import Location

NAME = "clu"
LOOKS_FOR = "a directory with a file 'checkpoint' that names the newest, or one file ckpt-1.flax"

# TensorFlow's text file, which is replaced when all files of a checkpoint are there.
_POINTER = "checkpoint"
_NEWEST = re.compile(rb'model_checkpoint_path:\s*"(?:[^"\n]*/)?([\w.-]+)"')
_SUFFIX = ".flax"
_FILE = re.compile(r"ckpt-\d+\.flax")


def detect(path: Location) -> bool:
    """Whether `path` is such a file, or a directory of such files with the one that names one."""
    if _FILE.fullmatch(path.name):
        return flax_msgpack.detect(path)
    found = path.children()
    if _POINTER not in found or not any(name.endswith(_SUFFIX) for name in found):
        return False
    return (path / _POINTER).read(0, 21) == b"model_checkpoint_path"


def read(path: Location) -> Any:
    """The state in the file `path`, or in the newest of the directory `path`.

    Raises:
      CorruptCheckpointError: when it is damaged.
    """
    return flax_msgpack.read(path if _FILE.fullmatch(path.name) else _newest(path))


def _newest(directory: Location) -> Location:
    """The file that the text file in `directory` names."""
    match = _NEWEST.match((directory / _POINTER).read())
    if match is None:
        raise CorruptCheckpointError(
            f"{directory / _POINTER} does not name a checkpoint. Restore one of its .flax files."
        )
    return directory / f"{match[1].decode()}{_SUFFIX}"
