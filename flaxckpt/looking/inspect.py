"""What is in a checkpoint, without reading an array."""

from __future__ import annotations

import dataclasses
from typing import Any

from flaxckpt.leaves.lazy import nbytes_of
from flaxckpt.opening import open_source
from flaxckpt.options import Options
from flaxckpt.restoring.source import SavedLeaf
from flaxckpt.storage.location import PathLike
from flaxckpt.tree.rebuild import build


@dataclasses.dataclass(frozen=True)
class LeafInfo:
    """One leaf of a checkpoint.

    Attributes:
      name: its key path.
      kind: what it was: `jax`, `numpy`, `int`, `str`, `prng_key`, ...
      dtype: the dtype of its array; empty when it has none.
      shape: the shape of its array.
      nbytes: the size of its array, in bytes.
      chunks: the shape of a chunk on disk.
      weak_type: jax's weak type.
      impl: the implementation of a PRNG key.
      mesh: the axes of the mesh that it was saved on, with their sizes; `None` off a mesh.
      spec: the entries of its PartitionSpec on that mesh.
    """

    name: str
    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    nbytes: int = 0
    chunks: tuple[int, ...] = ()
    weak_type: bool = False
    impl: str = ""
    mesh: dict[str, int] | None = None
    spec: tuple[Any, ...] = ()


def inspect(path: PathLike, *, options: Options = Options()) -> Any:
    """The tree of the checkpoint at `path`, of any format, with a `LeafInfo` for each leaf.

    Args:
      path: as for `flaxckpt.restore`.
      options: how object stores are reached.

    Raises:
      CheckpointNotFoundError: when there is no checkpoint at `path`.
      CorruptCheckpointError: when its metadata are damaged.

    Example:
      >>> import numpy as np
      >>> flaxckpt.save(tmp_path / "exported", {"kernel": np.ones((2, 3))})
      >>> flaxckpt.inspect(tmp_path / "exported")["kernel"].shape
      (2, 3)
    """
    source = open_source(path, options)
    return build(source.nodes, [_info(leaf) for leaf in source.leaves])


def _info(leaf: SavedLeaf) -> LeafInfo:
    """A leaf as people want to see it."""
    spec, array = leaf.spec, leaf.array
    if array is None:
        return LeafInfo(leaf.name, spec.kind, impl=spec.impl)
    mesh: dict[str, int] | None = None
    partition: tuple[Any, ...] = ()
    if array.sharding is not None:
        axes = array.sharding["mesh"]
        mesh = dict(zip(axes["axis_names"], axes["shape"], strict=True))
        partition = tuple(tuple(p) if isinstance(p, list) else p for p in array.sharding["spec"])
    return LeafInfo(
        leaf.name,
        spec.kind,
        array.dtype,
        array.shape,
        nbytes_of(array),
        tuple(array.chunks),
        spec.weak_type,
        spec.impl,
        mesh,
        partition,
    )
