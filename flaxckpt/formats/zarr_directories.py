"""Trees that are one zarr directory for each leaf, in directories of directories."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.formats import zarr
from flaxckpt.leaves.lazy import LazyLeaf
from flaxckpt.leaves.record import LeafSpec
from flaxckpt.storage.location import Location

METADATA = ".zarray"
# As in the other formats; recursion over what is restored must not end in a RecursionError.
_MAX_DEPTH = 128


def array_names(path: Location) -> list[str]:
    """The names of all zarr v2 directories below `path`, relative to it, sorted."""
    if not isinstance(path, Path):
        ending = f"/{METADATA}"
        return sorted(n.removesuffix(ending) for n in path.names() if n.endswith(ending))
    found = []
    for directory, below, names in os.walk(path):
        if METADATA in names:
            below.clear()  # an array has chunks, and nothing else
            found.append(Path(directory).relative_to(path).as_posix())
    return sorted(name for name in found if name != ".")


def read_arrays(path: Location, names: Sequence[str]) -> dict[str, LazyLeaf]:
    """The arrays `names` below `path`; which of them were numpy's is not known.

    Raises:
      CorruptCheckpointError: when one is damaged.
    """
    # Chunks that are all zeros are left out by zarr's own default.
    arrays = zarr.open_all(path, names, missing_as_zero=True)
    return {a.name: LazyLeaf(LeafSpec("numpy", a.dtype, a.shape), a) for a in arrays}


def nested(leaves: Mapping[str, Any], separator: str, path: Location) -> dict[str, Any]:
    """The tree of dicts whose leaves have the names of `leaves`.

    Raises:
      CorruptCheckpointError: when a leaf lies within another, or too deep; `path` is named.
    """
    root: dict[str, Any] = {}
    for name, leaf in sorted(leaves.items()):
        *parents, last = name.split(separator)
        node = _descend(root, parents) if len(parents) < _MAX_DEPTH else None
        if node is None or last in node:
            raise CorruptCheckpointError(
                f"{path} holds no tree: the leaf {name!r} is within another one, or too deep. "
                "Restore another step."
            )
        node[last] = leaf
    return root


def _descend(node: dict[str, Any], keys: Iterable[str]) -> dict[str, Any] | None:
    """The dict at `keys` of `node`, made where it is missing; `None` where there is a leaf."""
    for key in keys:
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            return None
        node = child
    return node
