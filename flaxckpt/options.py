"""The settings of a save or a restore, in one place."""

from __future__ import annotations

import dataclasses

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Options:
    """How checkpoints are written and read.

    Attributes:
      chunk_bytes: largest chunk of an array on disk, in bytes. A chunk is the unit of reading and
        of checking; an array (or a device's shard of it) up to this size is one chunk.
      buffer_bytes: how many bytes of encoded chunks a save or a restore has in flight at a time,
        beside the state itself; two chunks more than this may be held. (A restore also has the
        parts of one array on the host that the devices of this process hold.)
      fsync: whether a save waits until the disk has it. `False` is for scratch disks: a crash of
        the machine may then lose steps that were reported as saved; a crash of the process won't.
      atomic_rename: whether the file system renames a directory atomically and without copying
        it. `False` is for buckets that are mounted as directories: a step is then written in place
        and becomes visible by a marker, and cannot be replaced with `overwrite=True`.
      timeout_secs: how long `wait`, `close` and a save that waits for the one before it wait for
        a save in the background, in seconds, before they raise.

    Raises:
      ValueError: when a size or the timeout is not positive.

    Example:
      >>> import flaxckpt
      >>> flaxckpt.Options(fsync=False).chunk_bytes
      67108864
    """

    chunk_bytes: int = 64 * MIB
    buffer_bytes: int = 256 * MIB
    fsync: bool = True
    atomic_rename: bool = True
    timeout_secs: float = 3600.0

    def __post_init__(self) -> None:
        """Refuses sizes and timeouts that are not positive."""
        for field in ("chunk_bytes", "buffer_bytes", "timeout_secs"):
            if not getattr(self, field) > 0:
                raise ValueError(f"Options.{field} must be positive, got {getattr(self, field)!r}")
