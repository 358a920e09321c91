"""flaxckpt cp."""

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

# Copying one file, between disks and buckets, and making sure that the copy is one.


def copy_file(source: Location, target: Location) -> int:
    """Copies a file to where there is none, and reads the copy; returns its size.

    An object is on the host as a whole. (Those of flaxckpt have some 256 MiB at the most.)

    Raises:
      FileNotFoundError: when there is no such file.
      CorruptCheckpointError: when what is read from the copy is something else.
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
            f"what is read from the copy {target} is not what was written. Try again."
        )
    return nbytes


# Copying a committed checkpoint: its files, and a commit like that of a save.
#
# The copy has the id of the save that wrote the checkpoint: the metadata, the arrays and the marker
# all name it. The metadata are the first file that is written. By them a copy in a bucket that was
# cut short is known for what it is, and removed by the next writer.


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
    committing = final.store.commit(final, attempt, overwrite=overwrite)
    with final.store.reached(), committing as directory, checkpoint.unchanged():
        _copy(checkpoint, directory, advance)
    if with_pin and (checkpoint.path / layout.PINNED).exists():
        final.store.set_flag(final / layout.PINNED, present=True)
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
        return step_metadata.read(final).attempt == checkpoint.described.attempt
    except (CheckpointNotFoundError, OSError, FlaxckptError):
        return False


def _copy(checkpoint: Checkpoint, directory: Location, advance: Advance) -> None:
    """Writes all of a copy but what the commit writes."""
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


def _copy_one(source: Location, target: Location, advance: Advance, name: str) -> None:
    """Copies one file."""
    advance(copy_file(source / name, target / name))


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


def _write_described(checkpoint: Checkpoint, directory: Location) -> None:
    """Writes what is known of a checkpoint, as the other kind of storage has it."""
    described = checkpoint.described
    items = {name: _item(name, item, directory) for name, item in described.items.items()}
    for name, item in items.items():
        if item.files.keys() - described.items[name].files.keys():
            _write_marker(directory / name)
    data = step_metadata.encode(dataclasses.replace(described, items=items))
    _write(directory / layout.CHECKPOINT_METADATA, data)


def _item(name: str, item: ItemRecord, directory: Location) -> ItemRecord:
    """The record of an item, which in a bucket has a marker for Orbax."""
    del name
    has_marker = directory.store.can.sizes or item.tree == ""  # that of the tree will do
    files = {**item.files, **({} if has_marker else {layout.COMMIT_SUCCESS: _MARKER})}
    return dataclasses.replace(item, files=files)


def _write_tree(tree: Checkpoint, item: Location, names: list[str]) -> None:
    """Writes the metadata of a tree: a directory's list the files of the database.

    In a bucket, Orbax wants a marker, too.
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
    """Writes what tells Orbax that a part of a checkpoint is all there."""
    _write(directory / layout.COMMIT_SUCCESS, layout.ITEM_MARKER)


def _write(path: Location, data: bytes) -> None:
    """Writes a new file."""
    path.store.make_directory(path.parent)
    path.create(data)


# `flaxckpt cp A B`: copies a checkpoint, or all steps of a run, between disks and buckets.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    parser.add_argument("a", metavar="A", help="a checkpoint of flaxckpt or a run, or its URL")
    parser.add_argument("b", metavar="B", help="where the copy shall be, not what it shall be in")
    add_writing(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    """Copies what is at A to B."""
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
    """The error that nothing at a path can be copied."""
    from flaxckpt.errors import CheckpointNotFoundError
    from flaxckpt.formats.opening import open_source

    try:
        open_source(source, options)
    except CheckpointNotFoundError as error:
        return error
    return CliError(f"{source} is of another format. Use flaxckpt convert, or a copy of its files.")


def _one(
    place: Location,
    final: Location,
    options: Options,
    out: Output,
    overwrite: bool,
    *,
    is_step: bool,
) -> dict[str, Any]:
    """Copies one checkpoint; says what became of it."""
    from flaxckpt.errors import CheckpointNotFoundError

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
        if not is_step:  # the run goes on meanwhile
            raise
        state = "deleted during the copy"
    speed = f", {text.size(total[0])}, {text.size(int(total[0] / clock.seconds))}/s"
    out.lines(f"{place} -> {final}: {state}{speed if state == 'copied' else ''}")
    return {"from": str(place), "to": str(final), "state": state, "nbytes": total[0]}
