"""What each process of a job contributes to a checkpoint, and that they agree on the rest.

An array that is spread over the processes is written by those that hold it. Everything else, such
as numpy arrays, numbers and strings, is written by process 0 and must be the same on all of them:
a counter that differs would be lost without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import crc32c
import numpy as np
import orjson

from flaxckpt.errors import ProcessFailedError
from flaxckpt.metadata.files import SavedFile
from flaxckpt.saving.plan import SavePlan
from flaxckpt.saving.snapshot import Piece
from flaxckpt.storage import zarr3


class Part(NamedTuple):
    """What one process has done of one tree.

    Attributes:
      tree: a checksum of the structure, the types, the shardings, and what is held as JSON.
      local: what the arrays are like that are not spread over processes, by their names.
      files: the files that it wrote within the item, with their sizes, where those are known.
      is_written: whether it wrote any value.
    """

    tree: int
    local: dict[str, str]
    files: dict[str, int]
    is_written: bool

    def to_json(self) -> dict[str, Any]:
        """As a note to process 0."""
        return self._asdict()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The part that `to_json` gave."""
        return cls(**data)


class Share(NamedTuple):
    """What one process has done of a checkpoint.

    Attributes:
      trees: its parts of the trees, the state first.
      files: the files that it wrote for itself, by their items and names, with size and checksum.
      items: a checksum of what must be the same of each item.
    """

    trees: list[Part]
    files: dict[str, dict[str, SavedFile]]
    items: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """As a note to process 0."""
        files = {
            item: {name: list(file) for name, file in found.items()}
            for item, found in self.files.items()
        }
        trees = [part.to_json() for part in self.trees]
        return {"trees": trees, "files": files, "items": self.items}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The share that `to_json` gave."""
        files = {
            item: {name: SavedFile(*file) for name, file in found.items()}
            for item, found in data["files"].items()
        }
        return cls(list(map(Part.from_json, data["trees"])), files, data["items"])


def check_items(shares: Sequence[Share], title: str) -> None:
    """Checks that all processes save the same items.

    Raises:
      ProcessFailedError: when they do not; a process and the items are named.
    """
    first = shares[0].items
    for i, share in enumerate(shares):
        names = sorted(first.keys() | share.items.keys())
        different = [name for name in names if first.get(name) != share.items.get(name)]
        if different:
            raise ProcessFailedError(
                f"{title}: process {i} saves other items than process 0: {', '.join(different)} "
                "are not the same, or not there. Only process 0's would be kept. Make them the "
                "same; only iterators and random generators may differ."
            )


def digest(plan: SavePlan) -> int:
    """A checksum of all that a plan says of the tree."""
    return crc32c.crc32c(orjson.dumps(plan.structure))


def own(
    pieces: Iterable[Piece], local: dict[str, str], *, is_leader: bool
) -> Iterator[tuple[str, bytes]]:
    """The keys and values that this process writes; puts into `local` what the rest is like."""
    checksums: dict[str, int] = {}
    for piece in pieces:
        if piece.array.is_local:
            name = piece.array.stored.store
            checksums[name] = _checksum(piece.values, checksums.get(name, 0))
            is_number = piece.array.stored.shape == piece.values.shape and piece.values.size == 1
            checksum = f"crc32c {checksums[name]:08x}"
            local[name] = repr(piece.values.item()) if is_number else checksum
        if is_leader or not piece.array.is_local:
            yield from piece.encode()


def _checksum(values: np.ndarray, before: int) -> int:
    """The checksum of the bytes of `values`, after others."""
    if values.dtype.hasobject or not values.size:
        return before
    return crc32c.crc32c(zarr3.as_bytes(np.ascontiguousarray(values)), before)


def check_equal(parts: Sequence[Part], title: str) -> None:
    """Checks that all processes save the same tree.

    Raises:
      ProcessFailedError: when they do not; the processes and the leaves are named.
    """
    first = parts[0]
    for i, part in enumerate(parts):
        if part.tree != first.tree:
            raise ProcessFailedError(
                f"{title}: process {i} saves another tree than process 0: its structure, types, "
                "shardings, or Python numbers or strings differ. Make them the same on all."
            )
        names = first.local.keys() | part.local.keys()
        different = sorted(n for n in names if first.local.get(n) != part.local.get(n))
        if different:
            head = _HEAD.format(title, i, len(different))
            rows = _rows(different, i, first, part)
            raise ProcessFailedError("\n".join([head, *rows, _TAIL]))


_HEAD = "{}: process {} has other values than process 0 in leaves of which each has its own ({}):"
_TAIL = (
    "Only process 0's would be kept. Make them the same, or one global array "
    "(jax.make_array_from_process_local_data)."
)


def _rows(names: Sequence[str], i: int, first: Part, part: Part) -> Iterator[str]:
    """The leaves that differ, on aligned lines."""
    width = max(map(len, names))
    for name in names:
        ours, theirs = first.local.get(name, "-"), part.local.get(name, "-")
        yield f"  {name:<{width}}  process 0: {ours}  process {i}: {theirs}"
