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

# Beside it, each in a directory of its name:
ITEM_NAME = "[A-Za-z][A-Za-z0-9_]*"
# Where in an item Orbax has the tree of a random key, and what it wants to know of it.
JAX_KEY, NUMPY_KEY = "jax_random_key", "np_random_key"
# Every directory that may hold a tree.
TREE = rf"{ITEM_NAME}(?:/(?:{JAX_KEY}|{NUMPY_KEY}))?"
# In an item: what an Orbax handler of JSON reads, and the files of the user's handlers.
JSON_FILE, PROTO_FILE, USER_FILES = "metadata", "proto.pbtxt", "files"

# In a step that a rollback has set aside, where directories cannot be renamed.
ASIDE = "_ASIDE"

CHECKPOINT_ENTRIES = frozenset({CHECKPOINT_METADATA, PINNED, CLAIM, COMMIT_SUCCESS, ITEM})

# In a bucket, next to the checkpoints:
CLAIMS = "_claims"
# The key-value store of a job without a coordination service.
KEY_VALUES = "notes"
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

_ASIDE = re.compile(r"(.+)\.flaxckpt-aside-[0-9a-f]{12}")
_STEP = re.compile(r"0|[1-9][0-9]*")
_DATABASE = re.compile(rf"({CHILD}[^/]+/)?({MANIFEST}|manifest\.\d+|d/[0-9a-f]+)")
_OWN = re.compile(r"process_([0-9]+)-of-([0-9]+)(?:-[0-9a-f]{12})?([./].+)")
_TEMPORARY = re.compile(r"(.+)\.flaxckpt-tmp-(.+)-([0-9a-f]{12})")


def step_name(step: int) -> str:
    """The directory of a step within its run."""
    return str(step)


def parse_step(name: str) -> int | None:
    """The step of a directory name; `None` for every other name."""
    return int(name) if _STEP.fullmatch(name) else None


def may_be_item(name: str) -> bool:
    """Whether a directory of this name may be an item of a checkpoint."""
    return re.fullmatch(ITEM_NAME, name) is not None


def is_of_database(name: str) -> bool:
    """Whether a file in the item directory is one of its key-value store, or of a child's."""
    return _DATABASE.fullmatch(name) is not None


def own_file(index: int, count: int, suffix: str, attempt: str = "") -> str:
    """The file in an item that process `index` of `count` has to itself.

    Args:
      index: of the process.
      count: of all processes.
      suffix: begins with a dot, or with a slash for a file in a directory of the process's own.
      attempt: of the save, for a name that no other attempt gives.
    """
    return f"process_{index}-of-{count}{attempt and '-'}{attempt}{suffix}"


def parse_own_file(name: str) -> tuple[int, int, str] | None:
    """Index, count and suffix of the name of a process's own file; `None` for every other."""
    found = _OWN.fullmatch(name)
    return (int(found[1]), int(found[2]), found[3]) if found else None


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


def aside_name(name: str, attempt: str) -> str:
    """Where a checkpoint called `name` is until it is deleted after a rollback."""
    return f"{name}.flaxckpt-aside-{attempt}"


def is_aside(name: str) -> bool:
    """Whether `aside_name` gives `name`."""
    return _ASIDE.fullmatch(name) is not None


def parse_temporary(name: str) -> tuple[str, str] | None:
    """The checkpoint and the host of a temporary name; `None` for every other name."""
    found = _TEMPORARY.fullmatch(name)
    return (found[1], found[2]) if found else None
