"""What a checkpoint may claim before anything is allocated for it: it is data, and not trusted.

The numbers are far above every real state, and low enough that damaged or hostile metadata cost
neither the memory nor the time of the reader.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.leaves.dtypes import storage_of
from flaxckpt.leaves.record import LeafRecord, StoredArray
from flaxckpt.storage import tensorstore_io, zarr3
from flaxckpt.storage.location import Location
from flaxckpt.tree.node import Node, named_nodes

MAX_LEAVES = 2_000_000
MAX_DEPTH = 500
MAX_AXES = 64
# numpy cannot address more, whatever the dtype.
MAX_ELEMENTS = 1 << 48


def check_structure(nodes: Sequence[Node | None], records: Sequence[LeafRecord], path: str) -> None:
    """Checks that the nodes are one tree over the leaves, and that the leaves have its names.

    Raises:
      CorruptCheckpointError: when they are not; `path` is named.
    """
    try:
        check_tree(nodes, records)
    except ValueError as error:
        raise CorruptCheckpointError(
            f"{path} does not describe a tree: {error}. Restore another step."
        ) from None


def check_tree(nodes: Sequence[Node | None], records: Sequence[LeafRecord]) -> None:
    """As `check_structure`.

    Raises:
      ValueError: when they are not.
    """
    if len(nodes) > 4 * MAX_LEAVES or len(records) > MAX_LEAVES:
        raise ValueError(f"{len(nodes)} nodes and {len(records)} leaves are too many")
    children = sum(len(node.keys) for node in nodes if node is not None)
    if children != len(nodes) - 1 or _depth(nodes) > MAX_DEPTH:
        raise ValueError("the structure is not one tree, or too deep")
    names = [name for name, node in named_nodes(nodes) if node is None]
    if names != [record.name for record in records] or len(set(names)) != len(names):
        raise ValueError("the names of the leaves are not those of the structure")


def _depth(nodes: Sequence[Node | None]) -> int:
    """How deep a preorder of nodes goes.

    Raises:
      ValueError: when it ends within a node, or goes on after the root.
    """
    open_children = [1]
    depth = 0
    for node in nodes:
        while open_children and not open_children[-1]:
            open_children.pop()
        if not open_children:
            raise ValueError("the structure is not one tree")
        open_children[-1] -= 1
        open_children.append(len(node.keys) if node else 0)
        depth = max(depth, len(open_children))
    return depth


def check_array(array: StoredArray) -> None:
    """Checks the shape of an array.

    Raises:
      ValueError: when it has too many axes or elements.
    """
    elements = math.prod((*array.shape, *storage_of(array.dtype).extra))
    if len(array.shape) > MAX_AXES or elements > MAX_ELEMENTS or max(array.shape, default=0) >> 60:
        raise ValueError(f"an array of shape {array.shape} is too large")


def check_sizes(item: Path, records: Sequence[LeafRecord]) -> None:
    """Checks that the files of a tree can hold the arrays that it claims to have.

    Chunks too large for the nodes of the B-tree lie in data files as they are, so together these
    files are at least as large. Smaller ones cost a byte each or more.

    Raises:
      CorruptCheckpointError: when they cannot, or a file is a link to somewhere else.
    """
    check_claims(item, records, _bytes_on_disk(item))


def check_claims(item: Location, records: Sequence[LeafRecord], on_disk: int) -> None:
    """As `check_sizes`, for files that are known to have `on_disk` bytes."""
    claimed = chunks = 0
    for array in (record.array for record in records if record.array is not None):
        one_chunk = array.shape == array.chunks
        count = 1 if one_chunk else zarr3.chunk_count(array.shape, array.chunks)
        storage = storage_of(array.dtype)
        size = zarr3.encoded_bytes(zarr3.stored_shape(array.chunks, storage), storage)
        chunks += count
        claimed += count * size if size > tensorstore_io.INLINE_BYTES else 0
    if claimed > on_disk or chunks > on_disk:
        raise CorruptCheckpointError(
            f"the arrays at {item} are said to have {chunks} chunks of {claimed} bytes, but its "
            f"files have {on_disk} bytes. Restore another step."
        )


def _bytes_on_disk(item: Path) -> int:
    """The size of all files of a tree, none of which may lie outside of it."""
    total = 0
    for directory, inner, names in os.walk(item):
        for path in (Path(directory, name) for name in (".", *inner, *names)):
            if path.is_symlink():
                raise CorruptCheckpointError(
                    f"{path} is a symbolic link, and checkpoints have none. Restore another step."
                )
        total += sum(os.stat(os.path.join(directory, name)).st_size for name in names)
    return total
