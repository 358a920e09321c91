"""Reading every byte of a checkpoint and checking every checksum, without a device."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import crc32c

from flaxckpt.checkpoint import Checkpoint, open_checkpoint, unchanged
from flaxckpt.chunk_reads import ArrayRead
from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.leaves.dtypes import storage_of
from flaxckpt.leaves.record import LeafRecord
from flaxckpt.metadata.tree import SavedFile
from flaxckpt.options import Options
from flaxckpt.reading import check_arrays
from flaxckpt.sharding.chunks import chunks_of, whole
from flaxckpt.storage import data_files, layout, location, zarr3
from flaxckpt.storage.index import Place, check_versions, read_index
from flaxckpt.storage.location import Location, PathLike

_PREFIX = f"{layout.ITEM}/"
_DATABASE = re.compile(
    rf"{_PREFIX}({layout.CHILD}[^/]+/)?({layout.MANIFEST}|manifest\.\d+|d/[0-9a-f]+)"
)


@dataclasses.dataclass(frozen=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
      path: the checkpoint.
      leaves: how many leaves it has.
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


def verify(path: PathLike, *, strict: bool = False, options: Options = Options()) -> VerifyReport:
    """Reads every byte of the checkpoint at `path` and checks every checksum.

    It also finds chunks and files that are missing, that no leaf has, or of another size.

    Args:
      path: the directory of one checkpoint.
      strict: whether to raise when something is wrong.
      options: how to read; `max_host_bytes` bounds the memory.

    Raises:
      CheckpointNotFoundError: when there is no checkpoint at `path`, or it was deleted meanwhile.
      CorruptCheckpointError: when its metadata are damaged, or with `strict` anything is.

    Example:
      >>> flaxckpt.save(tmp_path / "exported", {"step": 7})
      >>> bool(flaxckpt.verify(tmp_path / "exported"))
      True
    """
    checkpoint = open_checkpoint(path, options)
    records = checkpoint.tree.records
    with unchanged(checkpoint.path, checkpoint.described):
        problems = (
            *_check_files(checkpoint),
            *_check_keys(checkpoint),
            *_check_chunks(checkpoint, options.buffer_bytes),
        )
    if strict and problems:
        raise CorruptCheckpointError("\n".join(problems))
    nbytes = sum(record.array.nbytes for record in records if record.array is not None)
    return VerifyReport(str(checkpoint.path), len(records), nbytes, problems)


def _check_files(checkpoint: Checkpoint) -> Iterator[str]:
    """What is wrong with the files beside the metadata."""
    path, item, expected = checkpoint.path, checkpoint.item, checkpoint.tree.files
    found = set(location.files(path))
    ours = {layout.TREE_METADATA, *expected}
    if not isinstance(path, Path):  # of a bucket's data files nothing is known but their names
        ours |= {name[len(_PREFIX) :] for name in found if _DATABASE.fullmatch(name)}
    known = {_PREFIX + name for name in ours} | layout.CHECKPOINT_ENTRIES
    for name in sorted(found - known):
        yield f"the file {path}/{name} does not belong to the checkpoint"
    for name, file in expected.items():
        if _PREFIX + name not in found:
            yield f"the file {item}/{name} is missing"
        elif problem := _file_problem(item / name, file):
            yield f"the file {item}/{name} {problem}"


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
    return bytes(data_files.read(directory, place)) if place.length == size else None


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


def _check_chunks(checkpoint: Checkpoint, ahead: int) -> list[str]:
    """What is wrong with the chunks of each leaf."""
    reads = [
        ArrayRead(record.name, record.array, [whole(record.array.shape)])
        for record in checkpoint.tree.records
        if record.array is not None
    ]
    try:
        return check_arrays(checkpoint, reads, ahead)
    except CorruptCheckpointError as error:
        return [str(error)]
