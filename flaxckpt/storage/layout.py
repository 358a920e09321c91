"""The names of files and directories on disk. See docs/format.md."""

from __future__ import annotations

import re
import socket
import uuid

FORMAT_VERSION = 1

# In a checkpoint (a step of a run, or a path given to `save`):
CHECKPOINT_METADATA = "_CHECKPOINT_METADATA"
PINNED = "PINNED"
CLAIM = "_CLAIM"
COMMIT_SUCCESS = "commit_success.txt"
# What that of the item says, which only Orbax asks for.
ITEM_MARKER = b"the marker is that of the step"
ITEM = "state"

CHECKPOINT_ENTRIES = frozenset({CHECKPOINT_METADATA, PINNED, CLAIM, COMMIT_SUCCESS, ITEM})

# In a bucket, next to the checkpoints:
CLAIMS = "_claims"
NOTES = "notes"
# In place of a host: what belongs to all of a job goes when nobody has touched it for a day.
ALL_HOSTS = "all.hosts"
PROBE = "_flaxckpt-probe-"

# In the item directory:
TREE_METADATA = "_METADATA"
SHARDING = "_sharding"
ARRAY_METADATAS = "array_metadatas"
STRINGS = "_strings.json"
MANIFEST = "manifest.ocdbt"
# With the number of a process and the attempt: what that process wrote of the arrays.
CHILD = "ocdbt.process_"

# In the key-value store; no array has it, as theirs end in zarr.json or a chunk.
ATTEMPT_KEY = "flaxckpt.attempt"

_STEP = re.compile(r"0|[1-9][0-9]*")
_TEMPORARY = re.compile(r"(.+)\.flaxckpt-tmp-(.+)-([0-9a-f]{12})")


def step_name(step: int) -> str:
    """The directory of a step within its run."""
    return str(step)


def parse_step(name: str) -> int | None:
    """The step of a directory name; `None` for every other name."""
    return int(name) if _STEP.fullmatch(name) else None


def new_attempt() -> str:
    """An id for one attempt to write a checkpoint."""
    return uuid.uuid4().hex[:12]


def host_name() -> str:
    """The name of this machine, as part of a file name."""
    return re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname()) or "localhost"


def temporary_name(name: str, attempt: str, host: str | None = None) -> str:
    """Where a checkpoint called `name` is written before it is committed. No reader lists it.

    The `host` is that of the writer: this one.
    """
    return f"{name}.flaxckpt-tmp-{host or host_name()}-{attempt}"


def parse_temporary(name: str) -> tuple[str, str] | None:
    """The checkpoint and the host of a temporary name; `None` for every other name."""
    found = _TEMPORARY.fullmatch(name)
    return (found[1], found[2]) if found else None
