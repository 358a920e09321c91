"""How to write and read."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from flaxckpt.arguments import check_count, check_positive, check_type

# https://google.github.io/tensorstore/kvstore/s3/index.html
# https://google.github.io/tensorstore/kvstore/gcs/index.html
_CREDENTIALS = re.compile(r"environment|anonymous|profile:.+")


@dataclasses.dataclass(frozen=True)
class ObjectStore:
    """How object stores are reached.

    Attributes:
      endpoint: the URL of a server that speaks S3; by default that of AWS. (For another server of
        GCS, set the environment variable `TENSORSTORE_GCS_HTTP_URL`.)
      region: of an S3 bucket; by default AWS is asked for it.
      credentials: for S3: `environment` for `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`,
        `anonymous`, or `profile:name`; by default what AWS's own tools would use. GCS uses
        Google's application default credentials.
      retries: how often a request is repeated that failed for a passing reason, after half a
        second, then one, two, four and at most eight.
      timeout_secs: how long the answer to a request is waited for, in seconds, with all its
        repetitions; at most `Options.timeout_secs`. A request moves at most 48 MiB.

    Raises:
      ValueError: when one of them is none of these.

    Example:
      >>> import flaxckpt
      >>> store = flaxckpt.ObjectStore(endpoint="http://minio:9000", region="us-east-1")
      >>> flaxckpt.Options(storage=store).storage.retries
      8
    """

    endpoint: str | None = None
    region: str | None = None
    credentials: str | None = None
    retries: int = 8
    timeout_secs: float = 300.0

    def __post_init__(self) -> None:
        """Refuses what TensorStore would refuse later, or misunderstand."""
        if self.endpoint is not None and not re.match("https?://.", self.endpoint):
            raise ValueError(f"ObjectStore.endpoint must be an http URL, got {self.endpoint!r}")
        if self.credentials is not None and not _CREDENTIALS.fullmatch(self.credentials):
            raise ValueError(
                "ObjectStore.credentials must be environment, anonymous or profile:name, got "
                f"{self.credentials!r}"
            )
        if self.retries < 0 or not self.timeout_secs > 0:
            raise ValueError(
                "ObjectStore.retries must not be negative, and timeout_secs positive, got "
                f"{self.retries} and {self.timeout_secs}"
            )


# The settings of a save or a restore, in one place.


MIB = 1 << 20
# One dtype for all floating arrays, or dtypes by pattern over key paths.
SaveDtype = str | Mapping[str, str]
# Encoded chunks in flight: enough to keep a disk busy while the next ones are made.
BUFFER_BYTES = 96 * MIB
# Of these, so many chunks are there at the least: being made, being written, and one of each kind
# in TensorStore's hands.
MIN_CHUNKS = 4
# What takes more than this part of the memory for values moves between devices and the host chunk
# by chunk.
PART = 4


@dataclasses.dataclass(frozen=True)
class Options:
    """How checkpoints are written and read.

    Attributes:
      chunk_bytes: largest chunk of an array on disk, in bytes. A chunk is the unit of reading and
        of checking; an array (or a device's shard of it) up to this size is one chunk.
      max_host_bytes: the most host memory, in bytes, that a save or a restore has beside the state
        itself. A save that does not fit is taken in rounds: it returns when what is not on disk
        yet fits. By default a save returns as soon as all of the state is safe on the host, which
        for arrays of an accelerator and for numpy arrays is a copy of them; jax arrays on the CPU
        are not copied. Beside that, 96 MiB are used; and, whatever this says, some 10 KiB for each
        leaf that is restored.
      fsync: whether a save waits until the disk has it. `False` is for scratch disks: a crash of
        the machine may then lose steps that were reported as saved; a crash of the process won't.
      atomic_rename: whether the file system renames a directory atomically and without copying
        it. `False` is for buckets that are mounted as directories: a step is then written in place
        and becomes visible by a marker, and cannot be replaced with `overwrite=True`.
      timeout_secs: how long anything is waited for, in seconds, before that is an error: a save in
        the background, other processes, an object store.
      broadcast: whether, of an array that several processes hold copies of, one copy is read and
        sent to the others over the devices' network. It saves reads; all processes must restore
        the same tree at the same time, and one that dies meanwhile takes the others with it.
      save_dtype: the dtype that floating arrays of the state are saved with: one name, such as
        `bfloat16`, for all, or names by pattern, of which the first that selects a leaf counts. A
        pattern is the key path of a node, for all leaves of its subtree, or a regular expression
        that must match a whole key path (`re.fullmatch`). The arrays are converted where
        they are, which needs room there. A restore to the old dtype asks for `dtype="widen"`.
      progress: whether a save or a restore that takes longer than two seconds shows a bar, where
        the standard error is a terminal.
      storage: how object stores (`s3://`, `gs://`) are reached.

    Raises:
      ValueError: when a size or the timeout is not positive, `max_host_bytes` has not room for
        four chunks, or `save_dtype` names no floating dtype.

    Example:
      >>> import flaxckpt
      >>> flaxckpt.Options(fsync=False).chunk_bytes
      8388608
    """

    chunk_bytes: int = 8 * MIB
    max_host_bytes: int | None = None
    fsync: bool = True
    atomic_rename: bool = True
    timeout_secs: float = 3600.0
    broadcast: bool = False
    save_dtype: SaveDtype | None = None
    progress: bool = True
    storage: ObjectStore = ObjectStore()

    def __post_init__(self) -> None:
        """Refuses sizes and timeouts that are not positive, or do not go together."""
        for field in ("chunk_bytes", "timeout_secs"):
            is_count = field == "chunk_bytes"
            check_positive(f"Options.{field}", getattr(self, field), is_count=is_count)
        if self.max_host_bytes is not None:
            check_count("Options.max_host_bytes", self.max_host_bytes)
        check_type(ObjectStore, "Options(storage=...)", self.storage)
        least = MIN_CHUNKS * self.chunk_bytes
        if self.max_host_bytes is not None and self.max_host_bytes < least:
            raise ValueError(
                f"Options.max_host_bytes={self.max_host_bytes!r} is less than {MIN_CHUNKS} chunks "
                f"of {self.chunk_bytes} bytes. Make chunk_bytes smaller."
            )
        if self.save_dtype is not None:
            _check_save_dtype(self.save_dtype)

    @property
    def buffer_bytes(self) -> int:
        """How many bytes of encoded chunks are in flight."""
        return min(BUFFER_BYTES, (self.max_host_bytes or 2 * BUFFER_BYTES) // 2)

    @property
    def snapshot_bytes(self) -> int | None:
        """How many bytes of values wait to be encoded; `None` for any number."""
        return None if self.max_host_bytes is None else self.max_host_bytes // 2


def _check_save_dtype(wanted: SaveDtype) -> None:
    """Refuses names of no floating dtype, and patterns that are none."""
    from flaxckpt.leaves.dtypes import is_floating  # it needs numpy, and few set this

    for name in wanted.values() if isinstance(wanted, Mapping) else [wanted]:
        if not isinstance(name, str) or not is_floating(name):
            raise ValueError(
                f"Options.save_dtype names {name!r}, which is not the name of a floating dtype, "
                "such as 'bfloat16'"
            )
    for pattern in wanted if isinstance(wanted, Mapping) else ():
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"Options.save_dtype has {pattern!r}, which is not a valid regular expression: "
                f"{error}"
            ) from None
