"""Looking into a checkpoint: inspect, lazy, verify."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import crc32c

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.formats.opening import open_source
from flaxckpt.leaves.dtypes import storage_of
from flaxckpt.leaves.spec import LeafRecord
from flaxckpt.metadata.sealed_json import SavedFile
from flaxckpt.options import Options
from flaxckpt.sharding.chunks import chunks_of, whole
from flaxckpt.source.checkpoint import (
    Checkpoint,
    Source,
    open_checkpoint,
    open_item,
    unchanged,
)
from flaxckpt.source.chunk_reads import ArrayRead, check_arrays
from flaxckpt.source.leaf import Leaf
from flaxckpt.store import layout, ocdbt, store, zarr3
from flaxckpt.store.ocdbt import Place, check_versions, read_index
from flaxckpt.store.store import Location, PathLike
from flaxckpt.tree.rebuild import build

# What is in a checkpoint, without reading an array.


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


def _info(leaf: Leaf) -> LeafInfo:
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
        leaf.nbytes,
        tuple(array.chunks),
        spec.weak_type,
        spec.impl,
        mesh,
        partition,
    )


# A checkpoint as a mapping of leaves that are read when they are asked for.


class LazyCheckpoint(Mapping[str, Leaf]):
    """The leaves of a checkpoint by key path, in the order of `jax.tree.leaves`.

    Attributes:
      metadata: what it was saved with as `metadata=`.
    """

    def __init__(self, source: Source):
        """The leaves of `source`."""
        self._source = source
        self._leaves = {leaf.name: leaf for leaf in source.leaves}
        self.metadata = dict(source.metadata)

    def __getitem__(self, name: str) -> Leaf:
        """The leaf at the key path `name`."""
        return self._leaves[name]

    def __iter__(self) -> Iterator[str]:
        """The key paths."""
        return iter(self._leaves)

    def __len__(self) -> int:
        """The number of leaves."""
        return len(self._leaves)

    def __repr__(self) -> str:
        """Where it is, and how much of it."""
        return f"LazyCheckpoint({str(self._source.path)!r}, {len(self)} leaves)"


def lazy(path: PathLike, *, options: Options = Options()) -> LazyCheckpoint:
    """Opens the checkpoint at `path`, of any format, without reading an array.

    Args:
      path: as for `flaxckpt.restore`.
      options: how to read.

    Raises:
      CheckpointNotFoundError: when there is no checkpoint at `path`.
      CorruptCheckpointError: when its metadata are damaged.

    Example:
      >>> import numpy as np
      >>> flaxckpt.save(tmp_path / "exported", {"params": {"kernel": np.eye(3)}})
      >>> kernel = flaxckpt.lazy(tmp_path / "exported")["params/kernel"]
      >>> kernel.shape, kernel.nbytes, kernel.read(np.s_[0])
      ((3, 3), 72, array([1., 0., 0.]))
    """
    return LazyCheckpoint(open_source(path, options))


# Reading every byte of a checkpoint and checking every checksum, without a device.


@dataclasses.dataclass(frozen=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
      path: the checkpoint.
      leaves: how many leaves it has, with those of items that are trees.
      nbytes: the size of its arrays, in bytes.
      problems: what is wrong, one line for each damaged leaf or file; empty when all is well.
    """

    path: str
    leaves: int
    nbytes: int
    problems: tuple[str, ...]

    def __bool__(self) -> bool:
        """Whether all is well."""
        return not self.problems


def verify(
    path: PathLike,
    *,
    strict: bool = False,
    options: Options = Options(),
    progress: Callable[[int], None] = lambda nbytes: None,
) -> VerifyReport:
    """Reads every byte of the checkpoint at `path` and checks every checksum.

    It also finds chunks and files that are missing, that no leaf has, or of another size.

    Args:
      path: the directory of one checkpoint.
      strict: whether to raise when something is wrong.
      options: how to read; `max_host_bytes` bounds the memory.
      progress: is called with the number of bytes that were read since the last time.

    Raises:
      CheckpointNotFoundError: when there is no checkpoint at `path`, or it was deleted meanwhile.
      CorruptCheckpointError: when its metadata are damaged, or with `strict` anything is.

    Example:
      >>> flaxckpt.save(tmp_path / "exported", {"step": 7})
      >>> bool(flaxckpt.verify(tmp_path / "exported"))
      True
    """
    checkpoint = open_checkpoint(path, options)
    with unchanged(checkpoint.path, checkpoint.described):
        trees, unreadable = _trees(checkpoint)
        found = (
            *unreadable.values(),
            *_check_files(checkpoint, trees, unreadable),
            *(line for tree in trees for line in _check_tree(tree, options.buffer_bytes, progress)),
        )
    problems = tuple(dict.fromkeys(found))  # a damaged index is in the way of keys and of chunks
    if strict and problems:
        raise CorruptCheckpointError("\n".join(problems))
    records = [record for tree in trees for record in tree.tree.records]
    nbytes = sum(record.nbytes for record in records)
    return VerifyReport(str(checkpoint.path), len(records), nbytes, problems)


def _trees(checkpoint: Checkpoint) -> tuple[list[Checkpoint], dict[str, str]]:
    """The state and the items that are trees, and what is wrong with those that cannot be read."""
    trees, unreadable = [checkpoint], {}
    for name, item in checkpoint.described.items.items():
        try:
            trees += [] if item.tree is None else [open_item(checkpoint, name)]
        except CorruptCheckpointError as error:
            unreadable[name] = f"the item {name}: {error}"
    return trees, unreadable


def _check_files(
    checkpoint: Checkpoint, trees: Sequence[Checkpoint], unreadable: Container[str]
) -> Iterator[str]:
    """What is wrong with the files beside the metadata; not of items that are `unreadable`."""
    path, found = checkpoint.path, set(store.files(checkpoint.path))
    items = checkpoint.described.items.items()
    expected = {f"{t.directory}/{name}": file for t in trees for name, file in t.tree.files.items()}
    expected |= {f"{item}/{n}": file for item, record in items for n, file in record.files.items()}
    known = {f"{t.directory}/{layout.TREE_METADATA}" for t in trees} | layout.CHECKPOINT_ENTRIES
    if not isinstance(path, Path):  # of a bucket's data files nothing is known but their names
        known |= {name for name in found if any(_is_database(name, t.directory) for t in trees)}
    for name in sorted(found - known - expected.keys()):
        if name.split("/")[0] not in unreadable:
            yield f"the file {path}/{name} does not belong to the checkpoint"
    for name, file in expected.items():
        if name not in found:
            yield f"the file {path}/{name} is missing"
        elif problem := _file_problem(path / name, file):
            yield f"the file {path}/{name} {problem}"


def _is_database(name: str, directory: str) -> bool:
    """Whether a file is one of the key-value store of the tree in `directory`."""
    start = f"{directory}/"
    return name.startswith(start) and layout.is_of_database(name[len(start) :])


def _check_tree(tree: Checkpoint, ahead: int, progress: Callable[[int], None]) -> Iterator[str]:
    """What is wrong with the arrays of a tree."""
    where = "" if tree.directory == layout.ITEM else f"in {tree.directory}: "
    for line in (*_check_keys(tree), *_check_chunks(tree, ahead, progress)):
        yield f"{where}{line}"


def _file_problem(path: Location, file: SavedFile) -> str | None:
    """What is wrong with a file that is there."""
    if isinstance(path, Path) and (size := path.stat().st_size) != file.size:
        return f"has {size} bytes instead of {file.size}"
    if file.crc32c is None:
        return None
    data = path.read_bytes() if isinstance(path, Path) else path.read() or b""
    return None if crc32c.crc32c(data) == file.crc32c else "does not match its checksum"


def _check_keys(checkpoint: Checkpoint) -> Iterator[str]:
    """What is in the key-value store and belongs to no leaf, or is missing or wrong there."""
    arrays = [r for r in checkpoint.tree.records if r.array is not None]
    if not arrays:
        return
    try:
        index = read_index(checkpoint.item)
        check_versions(checkpoint.item)
        requests = [_metadata_request(record) for record in arrays]
        found = [_value(checkpoint.item, index.get(k), len(v)) for k, v in requests]
    except CorruptCheckpointError as error:
        yield str(error)
        return
    for record, value, (_, expected) in zip(arrays, found, requests, strict=True):
        if value != expected:
            yield f"the leaf {record.name}: its zarr.json is missing or does not fit the tree"
    known = {layout.ATTEMPT_KEY, *(key for key, _ in requests)}.union(*map(_chunk_keys, arrays))
    for key in sorted(index.keys() - known):
        yield f"the value {key} in {checkpoint.item} belongs to no leaf"


def _value(directory: Location, place: Place | bytes | None, size: int) -> bytes | None:
    """The value that lies at `place`, which should have `size` bytes; `None` when it has not."""
    if not isinstance(place, Place):
        return place
    return bytes(ocdbt.read(directory, place)) if place.length == size else None


def _metadata_request(record: LeafRecord) -> tuple[str, bytes]:
    """The key of an array's metadata, and what they must be."""
    assert record.array is not None
    storage = storage_of(record.array.dtype)
    shape = zarr3.stored_shape(record.array.shape, storage)
    chunk = zarr3.stored_shape(record.array.chunks, storage)
    expected = zarr3.array_metadata(shape, chunk, storage.data_type)
    return zarr3.metadata_key(record.array.store), expected


def _chunk_keys(record: LeafRecord) -> set[str]:
    """The keys of the chunks of an array."""
    assert record.array is not None
    storage, array = storage_of(record.array.dtype), record.array
    region = zarr3.stored_region(whole(array.shape), storage)
    grids = chunks_of(region, zarr3.stored_shape(array.chunks, storage))
    return {zarr3.chunk_key(array.store, grid) for grid, _ in grids}


def _check_chunks(checkpoint: Checkpoint, ahead: int, progress: Callable[[int], None]) -> list[str]:
    """What is wrong with the chunks of each leaf."""
    reads = [
        ArrayRead(leaf.name, leaf.array, [whole(leaf.array.shape)])
        for leaf in checkpoint.leaves
        if leaf.array is not None
    ]
    try:
        return check_arrays(reads, ahead, progress)
    except CorruptCheckpointError as error:
        return [str(error)]
