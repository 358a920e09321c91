"""Writing a save, with all processes of a job."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import crc32c
import numpy as np
import orjson
import tensorstore as ts

from flaxckpt.errors import ProcessFailedError
from flaxckpt.metadata import sealed_json, step_metadata
from flaxckpt.metadata.sealed_json import SavedFile
from flaxckpt.metadata.step_metadata import CheckpointMetadata, PastSave
from flaxckpt.metadata.tree_metadata import with_files
from flaxckpt.multihost import Collective
from flaxckpt.options import Options
from flaxckpt.progress import Progress
from flaxckpt.saving.contents import WholeTree, WrittenItem, WrittenTree
from flaxckpt.saving.save_plan import SavePlan
from flaxckpt.saving.snapshot import HostShard, by_tree
from flaxckpt.store import layout, ocdbt, zarr3
from flaxckpt.store.store import Location

# What each process of a job contributes to a checkpoint, and that they agree on the rest.
#
# An array that is spread over the processes is written by those that hold it. Everything else, such
# as numpy arrays, numbers and strings, is written by process 0 and must be the same on all of them:
# a counter that differs would be lost without a word.


class TreeManifest(NamedTuple):
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
        """As a message to process 0."""
        return self._asdict()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The part that `to_json` gave."""
        return cls(**data)


class ProcessManifest(NamedTuple):
    """What one process has done of a checkpoint.

    Attributes:
      trees: what it wrote of each tree.
      files: the files that it wrote for itself, by their items and names, with size and checksum.
      items: a checksum of what must be the same of each item.
    """

    trees: list[TreeManifest]
    files: dict[str, dict[str, SavedFile]]
    items: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """As a message to process 0."""
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
        return cls(list(map(TreeManifest.from_json, data["trees"])), files, data["items"])


def check_items(manifests: Sequence[ProcessManifest], title: str) -> None:
    """Checks that all processes save the same items.

    Raises:
      ProcessFailedError: when they do not; a process and the items are named.
    """
    first = manifests[0].items
    for i, manifest in enumerate(manifests):
        names = sorted(first.keys() | manifest.items.keys())
        different = [name for name in names if first.get(name) != manifest.items.get(name)]
        if different:
            raise ProcessFailedError(
                f"{title}: process {i} saves different items from process 0: "
                f"{', '.join(different)} differ or are missing. Only process 0's would be saved. "
                "Make them equal; only iterators and random generators may differ."
            )


def digest(plan: SavePlan) -> int:
    """A checksum of all that a plan says of the tree."""
    return crc32c.crc32c(orjson.dumps(plan.structure))


def own_values(
    shards: Iterable[HostShard], local: dict[str, str], *, is_process_0: bool
) -> Iterator[tuple[str, bytes]]:
    """The keys and values that this process writes.

    Records in `local` the value or checksum of each process-local array.
    """
    checksums: dict[str, int] = {}
    for shard in shards:
        if shard.array.is_local:
            name = shard.array.stored.store
            checksums[name] = _checksum(shard.values, checksums.get(name, 0))
            is_number = shard.array.stored.shape == shard.values.shape and shard.values.size == 1
            checksum = f"crc32c {checksums[name]:08x}"
            local[name] = repr(shard.values.item()) if is_number else checksum
        if is_process_0 or not shard.array.is_local:
            yield from shard.encode()


def _checksum(values: np.ndarray, before: int) -> int:
    """The checksum of the bytes of `values`, after others."""
    if values.dtype.hasobject or not values.size:
        return before
    return crc32c.crc32c(zarr3.as_bytes(np.ascontiguousarray(values)), before)


def check_equal(parts: Sequence[TreeManifest], title: str) -> None:
    """Checks that all processes save the same tree.

    Raises:
      ProcessFailedError: when they do not; the processes and the leaves are named.
    """
    first = parts[0]
    for i, part in enumerate(parts):
        if part.tree != first.tree:
            raise ProcessFailedError(
                f"{title}: process {i} and process 0 save different trees: structure, types, "
                "shardings, Python numbers or strings differ. Make the trees equal on all "
                "processes."
            )
        names = first.local.keys() | part.local.keys()
        different = sorted(n for n in names if first.local.get(n) != part.local.get(n))
        if different:
            head = _HEAD.format(title, i, len(different))
            rows = _rows(different, i, first, part)
            raise ProcessFailedError("\n".join([head, *rows, _TAIL]))


_HEAD = "{}: process {} and process 0 have different values in process-local leaves ({}):"
_TAIL = (
    "Only process 0's would be saved. Make the values equal, or make them a global array "
    "(jax.make_array_from_process_local_data)."
)


def _rows(names: Sequence[str], i: int, first: TreeManifest, part: TreeManifest) -> Iterator[str]:
    """The leaves that differ, on aligned lines."""
    width = max(map(len, names))
    for name in names:
        ours, theirs = first.local.get(name, "-"), part.local.get(name, "-")
        yield f"  {name:<{width}}  process 0: {ours}  process {i}: {theirs}"


# Writing one tree of a checkpoint: its arrays, by one process or merged from all, and the rest.


@dataclasses.dataclass(frozen=True)
class TreeWriter:
    """Writes one tree.

    Attributes:
      tree: which.
      item: its directory.
      attempt: the id of the save.
      options: how to write.
      is_marked: whether Orbax wants a marker in it.
      context: what copies within the checkpoint share.
    """

    tree: WrittenTree
    item: Location
    attempt: str
    options: Options
    is_marked: bool
    context: ts.Context

    def write_alone(self, shards: Iterable[HostShard]) -> dict[str, SavedFile]:
        """Writes all arrays; returns the files that they are in."""
        store = ocdbt.create_store(self.item, self.context)
        buffer_bytes, timeout_secs = self.options.buffer_bytes, self.item.store.timeout_secs
        ocdbt.write_all(store, self._all_values(shards), buffer_bytes, timeout_secs)
        return files_of(self.item)

    def write_own(self, shards: Iterable[HostShard], process: int) -> TreeManifest:
        """Writes what is `process`'s own of the arrays."""
        name = self._child(process)
        local: dict[str, str] = {}
        values = own_values(shards, local, is_process_0=process == 0)
        if (first := next(values, None)) is None:
            return TreeManifest(digest(self.tree.plan), local, {}, is_written=False)
        child = self.item / name
        child.store.make_directory(child)
        store = ocdbt.create_store(child, self.context, numbered=not child.store.can.rewrites)
        values = itertools.chain([first], values)
        ocdbt.write_all(store, values, self.options.buffer_bytes, child.store.timeout_secs)
        child.store.sync(child)
        files = {f"{name}/{file}": found.size for file, found in files_of(child).items()}
        return TreeManifest(digest(self.tree.plan), local, files, is_written=True)

    def merge(self, found: Sequence[TreeManifest], title: str) -> dict[str, SavedFile]:
        """Merges what all processes wrote; returns the files that it is in.

        Raises:
          ProcessFailedError: when they wrote different trees; `title` says what they did.
        """
        where = "" if self.tree.directory == layout.ITEM else f", {self.tree.directory}"
        check_equal(found, title + where)
        store = ocdbt.create_store(self.item, self.context)
        children = [
            ocdbt.open_store(self.item / self._child(i), self.context)
            for i, manifest in enumerate(found)
            if manifest.is_written
        ]
        own = (*self.tree.plan.array_metadata, self._attempt_entry)
        ocdbt.merge(store, children, own, self.item.store.timeout_secs)
        merged = {n: f for n, f in files_of(self.item).items() if not n.startswith(layout.CHILD)}
        sizes = (pair for manifest in found for pair in manifest.files.items())
        return {name: SavedFile(size, None) for name, size in sizes} | merged

    def write_metadata(self, files: dict[str, SavedFile], past: Sequence[PastSave]) -> None:
        """Writes all but the arrays, which are in `files`; the saves before are `past`."""
        plan = self.tree.plan
        # Where it cannot rely on a rename, Orbax wants a marker in the item too.
        marker = {layout.COMMIT_SUCCESS: layout.ITEM_MARKER} if self.is_marked else {}
        written = write_files(self.item, marker | self.tree.orbax_files)
        ours = with_files(plan.structure, self.attempt, files | written, past)
        data: dict[str, Any] = plan.orbax_members | {"flaxckpt": ours}
        (self.item / layout.TREE_METADATA).create(sealed_json.seal(data))

    def _all_values(self, shards: Iterable[HostShard]) -> Iterator[tuple[str, bytes]]:
        """All keys and values of the key-value store; the metadata is known last."""
        for shard in shards:
            yield from shard.encode()
        yield from self.tree.plan.array_metadata
        yield self._attempt_entry

    @property
    def _attempt_entry(self) -> tuple[str, bytes]:
        """The key and the value that say which save wrote the store."""
        return layout.ATTEMPT_KEY, self.attempt.encode()

    def _child(self, process: int) -> str:
        """The directory of the database of one process."""
        return f"{layout.CHILD}{process}-{self.attempt}"


def write_files(directory: Location, files: dict[str, bytes]) -> dict[str, SavedFile]:
    """Writes files below `directory`; returns their sizes and checksums."""
    for name, data in files.items():
        path = directory / name
        if "/" in name:
            path.store.make_directory(path.parent)
        path.create(data)
    return {name: SavedFile(len(data), crc32c.crc32c(data)) for name, data in files.items()}


def files_of(item: Location) -> dict[str, SavedFile]:
    """The files of a key-value store, whose contents carry checksums of their own.

    Of those in a bucket the sizes are not known, and the index has all that is needed of them.
    """
    if not item.store.can.sizes:
        return {}
    found = {name: item.store.stat(item / name) for name in item.store.names(item)}
    return {n: SavedFile(s.size, None) for n, s in found.items() if s and s.size is not None}


# One checkpoint to write.


@dataclasses.dataclass(frozen=True)
class PreparedSave:
    """One checkpoint to write: what, where, and what is known of it."""

    state: WrittenTree
    final: Location
    described: CheckpointMetadata
    overwrite: bool
    options: Options
    items: tuple[WrittenItem, ...] = ()
    past: tuple[PastSave, ...] = ()

    @functools.cached_property
    def trees(self) -> tuple[WrittenTree, ...]:
        """The trees of the items, then the state.

        The state is last, because its parts may still arrive while it is written.
        """
        return (*(item.tree for item in self.items if item.tree is not None), self.state)

    @property
    def directories(self) -> list[str]:
        """The innermost directories of the checkpoint."""
        others = (item.name for item in self.items if item.tree is None)
        return [*(tree.directory for tree in self.trees), *others]

    @property
    def held_bytes(self) -> int:
        """The size of what this process has of the arrays, each region once."""
        return sum(tree.plan.held_bytes for tree in self.trees)

    @property
    def total_bytes(self) -> int | None:
        """The same, where it is known from the start."""
        return self.held_bytes if isinstance(self.state, WholeTree) else None

    @property
    def is_marked(self) -> bool:
        """Whether the checkpoint becomes visible by a marker."""
        return not self.final.store.can.atomic_rename

    def writers(self, directory: Location) -> list[TreeWriter]:
        """What writes its trees into `directory`."""
        context, attempt = ts.Context(), self.described.attempt
        return [
            TreeWriter(
                tree, directory / tree.directory, attempt, self.options, self.is_marked, context
            )
            for tree in self.trees
        ]


# Writing the files of one checkpoint, by one process or by all of a job.
#
# Each process of several, and one that writes to a bucket, writes the chunks that are its own into
# databases of its own, one for each tree. Process 0 waits until all have, merges the databases,
# writes the metadata and commits. Merging copies where the values are, and no value.


def write(save: PreparedSave, shards: Iterable[HostShard], collective: Collective) -> None:
    """Writes `shards`, which this process has of the arrays; returns when all is committed.

    Raises:
      StepExistsError: if another writer has committed the checkpoint in between.
      ProcessFailedError: if another process of the job failed; nothing is committed then.
      ProcessTimeoutError: if another process of the job did not arrive.
    """
    is_process_0 = collective.group.is_process_0
    is_shown = is_process_0 and save.options.progress
    bar = Progress(f"saving {save.final}", save.total_bytes, is_shown=is_shown)
    with collective.sharing_errors(), save.final.store.reached(), bar:
        counted = bar.counted(shards, lambda shard: shard.values.nbytes)
        write_process = _write_process_0 if is_process_0 else _write_process
        write_process(save, counted, collective)


def _write_process_0(
    save: PreparedSave, shards: Iterable[HostShard], collective: Collective
) -> None:
    """Writes, merges and commits: process 0, or the only one."""
    store, attempt = save.final.store, save.described.attempt
    with store.commit(save.final, attempt, overwrite=save.overwrite) as directory:
        for name in save.directories:
            store.make_directory(directory / name)
        collective.publish("begun", directory.name)
        writers = save.writers(directory)
        if collective.group.count == 1 and store.can.locks:
            split = zip(writers, by_tree(shards, len(writers)), strict=True)
            arrays = [writer.write_alone(mine) for writer, mine in split]
            files = _write_item_files(save, directory)
        else:
            ours = _write_shards(save, shards, directory, writers, 0)
            found = [ours, *map(ProcessManifest.from_json, collective.gather())]
            check_items(found, collective.title)
            of_trees = zip(writers, zip(*(m.trees for m in found), strict=True), strict=True)
            arrays = [writer.merge(trees, collective.title) for writer, trees in of_trees]
            files = {
                item.name: {n: f for m in found for n, f in m.files[item.name].items()}
                for item in save.items
            }
        _write_metadata(save, directory, writers, arrays, files)
    collective.publish("outcome", attempt)


def _write_process(save: PreparedSave, shards: Iterable[HostShard], collective: Collective) -> None:
    """Writes what this process has: every process but 0."""
    directory, index = save.final.parent / collective.wait_for("begun"), collective.group.index
    try:
        manifest = _write_shards(save, shards, directory, save.writers(directory), index)
        collective.arrive(manifest.to_json())
    except FileNotFoundError:
        collective.raise_failure_of_process_0()  # process 0 may have cleaned up, and knows why
        raise
    finally:
        # This process may have written files after process 0 cleaned up. If `directory` is `final`,
        # it may already be committed, so leave it.
        if directory != save.final and collective.has_failed():
            directory.store.discard(directory)


def _write_shards(
    save: PreparedSave,
    shards: Iterable[HostShard],
    directory: Location,
    writers: list[TreeWriter],
    process: int,
) -> ProcessManifest:
    """Writes all that `process` writes beside others."""
    split = zip(writers, by_tree(shards, len(writers)), strict=True)
    trees = [writer.write_own(mine, process) for writer, mine in split]
    files = _write_item_files(save, directory)
    return ProcessManifest(trees, files, {item.name: item.digest for item in save.items})


def _write_item_files(save: PreparedSave, directory: Location) -> dict[str, dict[str, SavedFile]]:
    """Writes the files of each item that every process has for itself."""
    # Without locks, a process presumed dead may still write, so its file names carry the attempt.
    is_unique = not directory.store.can.locks
    written = {}
    for item in save.items:
        files = item.own(save.described.attempt if is_unique and item.rank.count > 1 else "")
        path = directory / item.name
        written[item.name] = write_files(path, files)
        if files:
            directory.store.sync(path)
    return written


def _write_metadata(
    save: PreparedSave,
    directory: Location,
    writers: list[TreeWriter],
    arrays: list[dict[str, SavedFile]],
    own: Mapping[str, Mapping[str, SavedFile]],
) -> None:
    """Writes the rest: `arrays` are the files of each tree, `own` of each item and process."""
    for writer, files_of_tree in zip(writers, arrays, strict=True):
        writer.write_metadata(files_of_tree, save.past if writer is writers[-1] else ())
    records = {}
    for item in save.items:
        files = dict(item.files)
        if save.is_marked and not (item.tree and item.tree.directory == item.name):
            files[layout.COMMIT_SUCCESS] = layout.ITEM_MARKER
        found = write_files(directory / item.name, files)
        records[item.name] = item.record({**found, **own[item.name]})
    described = dataclasses.replace(save.described, committed_ns=time.time_ns(), items=records)
    encoded = step_metadata.encode(described)
    (directory / layout.CHECKPOINT_METADATA).create(encoded)
