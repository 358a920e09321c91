"""`flaxckpt cp A B`: copies a checkpoint, or all steps of a run, between disks and buckets."""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import crc32c

from flaxckpt import text
from flaxckpt.cli.command import FINE, CliError, Clock, Output, add_writing, options_of
from flaxckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FlaxckptError,
    StepPinnedError,
)
from flaxckpt.inspecting import verify
from flaxckpt.metadata import sealed_json, step_metadata
from flaxckpt.metadata.sealed_json import SavedFile, read_json_file
from flaxckpt.metadata.step_metadata import ItemRecord
from flaxckpt.options import Options
from flaxckpt.saving.save import admit
from flaxckpt.source.checkpoint import Checkpoint, open_checkpoint, open_item
from flaxckpt.store import layout
from flaxckpt.store.store import Location


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `cp`."""
    parser.add_argument("a", metavar="A", help="path or URL of a flaxckpt checkpoint or run")
    parser.add_argument("b", metavar="B", help="path of the copy itself, not its parent directory")
    add_writing(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    """Copies a checkpoint, or the steps of a run."""
    from flaxckpt.run.listing import checkpoints_at
    from flaxckpt.store.locate import locate

    options = options_of(args)
    source, target = locate(args.a, options), locate(args.b, options)
    if str(source) == str(target):
        raise CliError(f"{source} cannot be copied to itself")
    found = checkpoints_at(source, options)
    if not found:
        raise _nothing(source, options)
    copied = []
    for step, place in found:
        final = target if step is None else target / str(step)
        copied.append(_one(place, final, options, out, args.overwrite, is_step=step is not None))
    out.document({"copies": copied})
    return FINE


def _nothing(source: Location, options: Options) -> Exception:
    """The error of a path without a checkpoint of flaxckpt."""
    from flaxckpt.formats.opening import open_source

    try:
        open_source(source, options)
    except CheckpointNotFoundError as error:
        return error
    return CliError(f"{source} has another format. Use flaxckpt convert, or copy its files.")


def _one(
    place: Location,
    final: Location,
    options: Options,
    out: Output,
    overwrite: bool,
    *,
    is_step: bool,
) -> dict[str, Any]:
    """Copies one checkpoint; returns its part of the document."""
    clock, total = Clock(), [0]

    def count(nbytes: int) -> None:
        total[0] += nbytes
        advance(nbytes)

    try:
        with out.progress(str(place), None) as advance:
            is_new = copy_checkpoint(
                place, final, options, count, overwrite=overwrite, with_pin=is_step
            )
        state = "copied" if is_new else "already copied"
    except CheckpointNotFoundError:
        if not is_step:  # the run continues during the copy
            raise
        state = "deleted during the copy"
    speed = f", {text.size(total[0])}, {text.size(int(total[0] / clock.seconds))}/s"
    out.lines(f"{place} -> {final}: {state}{speed if state == 'copied' else ''}")
    return {"from": str(place), "to": str(final), "state": state, "nbytes": total[0]}


# Copying a committed checkpoint: its files, and a commit like the commit of a save.
#
# The copy keeps the id of the save that wrote the checkpoint. The metadata, the arrays and the
# commit marker contain it. The metadata is written first, so that the next writer recognizes an
# interrupted copy in a bucket and removes it.


# How many objects are copied at a time; each of them is in memory.
THREADS = 4
# The commit writes these files, or the copy must not have them.
_NOT_COPIED = frozenset({layout.CLAIM, layout.COMMIT_SUCCESS, layout.PINNED})
_MARKER = SavedFile(len(layout.ITEM_MARKER), crc32c.crc32c(layout.ITEM_MARKER))


def copy_checkpoint(
    source: Location,
    final: Location,
    options: Options,
    advance: Callable[[int], None],
    *,
    overwrite: bool,
    with_pin: bool,
) -> bool:
    """Copies the checkpoint at `source` to `final`; returns `False` if it is already there.

    With `with_pin`, the copy of a pinned checkpoint is pinned.

    Raises:
      CheckpointNotFoundError: if there is no checkpoint at `source`, or someone deletes it.
      CorruptCheckpointError: if it is damaged; then there is no copy.
      StepExistsError: if another checkpoint is at `final`, and `overwrite` is not set.
      StepPinnedError: if the checkpoint at `final` is pinned.
    """
    checkpoint = open_checkpoint(source, options)
    if _is_there(checkpoint, final):
        return False
    _check_not_pinned(final)
    admit(final, overwrite, options)
    verify(source, strict=True, options=options)
    attempt = checkpoint.described.attempt
    committing = final.store.commit(final, attempt, overwrite=overwrite)
    with final.store.reached(), committing as directory, checkpoint.unchanged():
        _copy(checkpoint, directory, advance)
    if with_pin and (checkpoint.path / layout.PINNED).exists():
        final.store.set_flag(final / layout.PINNED, present=True)
    return True


def _check_not_pinned(final: Location) -> None:
    """Raises `StepPinnedError` if a pinned checkpoint would be replaced."""
    if (final / layout.PINNED).exists():
        raise StepPinnedError(f"{final} is pinned. Unpin it first: flaxckpt pin RUN STEP --unpin")


def _is_there(checkpoint: Checkpoint, final: Location) -> bool:
    """Whether `final` is a copy of the same checkpoint."""
    try:
        return step_metadata.read(final).attempt == checkpoint.described.attempt
    except (CheckpointNotFoundError, OSError, FlaxckptError):
        return False


def _copy(checkpoint: Checkpoint, directory: Location, advance: Callable[[int], None]) -> None:
    """Writes all of a copy, except the files that the commit writes."""
    names = [n for n in checkpoint.path.store.names(checkpoint.path) if n not in _NOT_COPIED]
    trees = dict(_trees(checkpoint))
    is_other = directory.store.can.sizes != checkpoint.path.store.can.sizes
    metadata = {f"{tree}/{layout.TREE_METADATA}" for tree in trees} | {layout.CHECKPOINT_METADATA}
    rewritten = metadata if is_other else set[str]()
    if is_other:
        _write_described(checkpoint, directory)
    first = [n for n in (layout.CHECKPOINT_METADATA,) if n not in rewritten]
    rest = [n for n in names if n not in rewritten and n not in first]
    copy = functools.partial(_copy_one, checkpoint.path, directory, advance)
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        list(map(copy, first))
        list(pool.map(copy, rest))
    for tree, opened in trees.items():
        if is_other:
            _write_tree(opened, directory / tree, [_below(n, tree) for n in names])


def _copy_one(
    source: Location, target: Location, advance: Callable[[int], None], name: str
) -> None:
    advance(copy_file(source / name, target / name))


def _below(name: str, directory: str) -> str:
    """The name of a file relative to `directory`; empty if the file is elsewhere."""
    start = f"{directory}/"
    return name[len(start) :] if name.startswith(start) else ""


def _trees(checkpoint: Checkpoint) -> Iterator[tuple[str, Checkpoint]]:
    """The state and the items that are trees, with their directories."""
    yield checkpoint.directory, checkpoint
    for name, item in checkpoint.described.items.items():
        if item.tree is not None:
            opened = open_item(checkpoint, name)
            yield opened.directory, opened


def _write_described(checkpoint: Checkpoint, directory: Location) -> None:
    """Writes the metadata of a checkpoint for the other kind of storage."""
    described = checkpoint.described
    items = {name: _item(item, directory) for name, item in described.items.items()}
    for name, item in items.items():
        if item.files.keys() - described.items[name].files.keys():
            _write_marker(directory / name)
    data = step_metadata.encode(dataclasses.replace(described, items=items))
    _write(directory / layout.CHECKPOINT_METADATA, data)


def _item(item: ItemRecord, directory: Location) -> ItemRecord:
    """The record of an item; in a bucket it has a commit marker for Orbax."""
    has_marker = directory.store.can.sizes or item.tree == ""  # that of the tree will do
    files = {**item.files, **({} if has_marker else {layout.COMMIT_SUCCESS: _MARKER})}
    return dataclasses.replace(item, files=files)


def _write_tree(tree: Checkpoint, item: Location, names: list[str]) -> None:
    """Writes the metadata of a tree: on a disk it lists the files of the database.

    In a bucket, Orbax needs a commit marker instead.
    """
    file = tree.item / layout.TREE_METADATA
    data = sealed_json.unseal(read_json_file(file), str(file))
    files = dict(tree.tree.files)
    if item.store.can.sizes:
        found = {n: item.store.stat(item / n) for n in filter(layout.is_of_database, names)}
        files |= {n: SavedFile(s.size, None) for n, s in found.items() if s and s.size is not None}
    elif layout.COMMIT_SUCCESS not in files:
        _write_marker(item)
        files[layout.COMMIT_SUCCESS] = _MARKER
    ours = data["flaxckpt"]
    del ours["crc32c"]
    ours["files"] = [[name, *found] for name, found in files.items()]
    _write(item / layout.TREE_METADATA, sealed_json.seal(data))


def _write_marker(directory: Location) -> None:
    """Writes the marker by which Orbax knows that an item is committed."""
    _write(directory / layout.COMMIT_SUCCESS, layout.ITEM_MARKER)


def _write(path: Location, data: bytes) -> None:
    path.store.make_directory(path.parent)
    path.create(data)


# Copying one file, and reading the copy again.


def copy_file(source: Location, target: Location) -> int:
    """Copies a file to a path without a file, and verifies the copy; returns its size.

    An object is in memory as a whole; objects of flaxckpt have at most about 256 MiB.

    Raises:
      FileNotFoundError: if there is no such file.
      CorruptCheckpointError: if the copy reads back differently.
    """
    target.store.make_directory(target.parent)
    nbytes = checksum = 0

    def counted() -> Iterator[bytes]:
        nonlocal nbytes, checksum
        for block in source.store.blocks(source):
            nbytes, checksum = nbytes + len(block), crc32c.crc32c(block, checksum)
            yield block

    target.store.create_from(target, counted())
    found = 0
    for block in target.store.blocks(target):
        found = crc32c.crc32c(block, found)
    if found != checksum:
        raise CorruptCheckpointError(
            f"the copy {target} reads back differently from its source. Run flaxckpt cp again."
        )
    return nbytes
