"""Copying a committed checkpoint: its files, and a commit like that of a save.

The copy has the id of the save that wrote the checkpoint: the metadata, the arrays and the marker
all name it. The metadata are the first file that is written. By them a copy in a bucket that was
cut short is known for what it is, and removed by the next writer.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import crc32c

from flaxckpt.checkpoint import Checkpoint, open_checkpoint, open_item
from flaxckpt.cli.work.file_copy import copy_file
from flaxckpt.errors import CheckpointNotFoundError, FlaxckptError, StepPinnedError
from flaxckpt.looking.verify import verify
from flaxckpt.metadata import checkpoint as checkpoint_metadata
from flaxckpt.metadata import sealed_json
from flaxckpt.metadata.files import SavedFile, read_json_file
from flaxckpt.metadata.items import ItemRecord
from flaxckpt.options import Options
from flaxckpt.saving.save import admit
from flaxckpt.storage import layout, location
from flaxckpt.storage.location import Location

Advance = Callable[[int], None]

# So many objects are copied at a time; each is in memory.
THREADS = 4
# What the commit writes, or nobody should have.
_NOT_COPIED = frozenset({layout.CLAIM, layout.COMMIT_SUCCESS, layout.PINNED})
_MARKER = SavedFile(len(layout.ITEM_MARKER), crc32c.crc32c(layout.ITEM_MARKER))


def copy_checkpoint(
    source: Location,
    final: Location,
    options: Options,
    advance: Advance,
    *,
    overwrite: bool,
    with_pin: bool,
) -> bool:
    """Copies the checkpoint at `source` to `final`; returns whether that was not done before.

    It is pinned if the original is, and `with_pin` is set.

    Raises:
      CheckpointNotFoundError: when there is none at `source`, or it was deleted meanwhile.
      CorruptCheckpointError: when it is damaged; there is no copy then.
      StepExistsError: when there is another one at `final`, and `overwrite` is not set.
      StepPinnedError: when that is pinned.
    """
    checkpoint = open_checkpoint(source, options)
    if _is_there(checkpoint, final):
        return False
    _check_not_pinned(final)
    admit(final, overwrite, options)
    verify(source, strict=True, options=options)
    attempt = checkpoint.described.attempt
    committing = location.committing(final, attempt, options, overwrite=overwrite)
    with location.reached(final), committing as directory, checkpoint.unchanged():
        _copy(checkpoint, directory, options, advance)
    if with_pin and (checkpoint.path / layout.PINNED).exists():
        location.set_flag(final / layout.PINNED, True, fsync=options.fsync)
    return True


def _check_not_pinned(final: Location) -> None:
    """Refuses to replace what is pinned.

    Raises:
      StepPinnedError: in that case.
    """
    if (final / layout.PINNED).exists():
        raise StepPinnedError(f"{final} is pinned. Unpin it first: flaxckpt pin RUN STEP --unpin")


def _is_there(checkpoint: Checkpoint, final: Location) -> bool:
    """Whether `final` is a copy of the same checkpoint."""
    try:
        return checkpoint_metadata.read(final).attempt == checkpoint.described.attempt
    except (CheckpointNotFoundError, OSError, FlaxckptError):
        return False


def _copy(checkpoint: Checkpoint, directory: Location, options: Options, advance: Advance) -> None:
    """Writes all of a copy but what the commit writes."""
    names = [n for n in location.files(checkpoint.path) if n not in _NOT_COPIED]
    trees = dict(_trees(checkpoint))
    is_other = isinstance(directory, Path) != isinstance(checkpoint.path, Path)
    metadata = {f"{tree}/{layout.TREE_METADATA}" for tree in trees} | {layout.CHECKPOINT_METADATA}
    rewritten = metadata if is_other else set[str]()
    if is_other:
        _write_described(checkpoint, directory, options)
    first = [n for n in (layout.CHECKPOINT_METADATA,) if n not in rewritten]
    rest = [n for n in names if n not in rewritten and n not in first]
    copy = functools.partial(_copy_one, checkpoint.path, directory, options.fsync, advance)
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        list(map(copy, first))
        list(pool.map(copy, rest))
    for tree, opened in trees.items():
        if is_other:
            _write_tree(opened, directory / tree, [_below(n, tree) for n in names], options)


def _copy_one(source: Location, target: Location, fsync: bool, advance: Advance, name: str) -> None:
    """Copies one file."""
    advance(copy_file(source / name, target / name, fsync=fsync))


def _below(name: str, directory: str) -> str:
    """The name of a file within a directory; empty for one elsewhere."""
    start = f"{directory}/"
    return name[len(start) :] if name.startswith(start) else ""


def _trees(checkpoint: Checkpoint) -> Iterator[tuple[str, Checkpoint]]:
    """The state and the items that are trees, by their directories."""
    yield checkpoint.directory, checkpoint
    for name, item in checkpoint.described.items.items():
        if item.tree is not None:
            opened = open_item(checkpoint, name)
            yield opened.directory, opened


def _write_described(checkpoint: Checkpoint, directory: Location, options: Options) -> None:
    """Writes what is known of a checkpoint, as the other kind of storage has it."""
    described = checkpoint.described
    items = {name: _item(name, item, directory) for name, item in described.items.items()}
    for name, item in items.items():
        if item.files.keys() - described.items[name].files.keys():
            _write_marker(directory / name, options)
    data = checkpoint_metadata.encode(dataclasses.replace(described, items=items))
    _write(directory / layout.CHECKPOINT_METADATA, data, options)


def _item(name: str, item: ItemRecord, directory: Location) -> ItemRecord:
    """The record of an item, which in a bucket has a marker for Orbax."""
    del name
    has_marker = isinstance(directory, Path) or item.tree == ""  # that of the tree will do
    files = {**item.files, **({} if has_marker else {layout.COMMIT_SUCCESS: _MARKER})}
    return dataclasses.replace(item, files=files)


def _write_tree(tree: Checkpoint, item: Location, names: list[str], options: Options) -> None:
    """Writes the metadata of a tree: a directory's list the files of the database.

    In a bucket, Orbax wants a marker, too.
    """
    file = tree.item / layout.TREE_METADATA
    data = sealed_json.unseal(read_json_file(file), str(file))
    files = dict(tree.tree.files)
    if isinstance(item, Path):
        databases = filter(layout.is_of_database, names)
        files |= {name: SavedFile((item / name).stat().st_size, None) for name in databases}
    elif layout.COMMIT_SUCCESS not in files:
        _write_marker(item, options)
        files[layout.COMMIT_SUCCESS] = _MARKER
    ours = data["flaxckpt"]
    del ours["crc32c"]
    ours["files"] = [[name, *found] for name, found in files.items()]
    _write(item / layout.TREE_METADATA, sealed_json.seal(data), options)


def _write_marker(directory: Location, options: Options) -> None:
    """Writes what tells Orbax that a part of a checkpoint is all there."""
    _write(directory / layout.COMMIT_SUCCESS, layout.ITEM_MARKER, options)


def _write(path: Location, data: bytes, options: Options) -> None:
    """Writes a new file."""
    if isinstance(path, Path):
        path.parent.mkdir(parents=True, exist_ok=True)
    location.write_file(path, data, fsync=options.fsync)
