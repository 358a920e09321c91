"""Writing one tree of a checkpoint: its arrays, by one process or merged from all, and the rest."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import crc32c
import tensorstore as ts

from flaxckpt.metadata import sealed_json
from flaxckpt.metadata.files import SavedFile
from flaxckpt.metadata.past import PastSave
from flaxckpt.metadata.tree import with_files
from flaxckpt.options import Options
from flaxckpt.saving import parts
from flaxckpt.saving.contents import WrittenTree
from flaxckpt.saving.parts import Part
from flaxckpt.saving.snapshot import Piece
from flaxckpt.storage import filesystem, layout, location, tensorstore_io
from flaxckpt.storage.location import Location


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

    def write_alone(self, pieces: Iterable[Piece]) -> dict[str, SavedFile]:
        """Writes all arrays; returns the files that they are in."""
        store = tensorstore_io.create_store(self.item, self.context, fsync=self.options.fsync)
        self._write_all(store, self._values(pieces))
        return files_of(self.item)

    def write_part(self, pieces: Iterable[Piece], process: int) -> Part:
        """Writes what is `process`'s own of the arrays."""
        fsync, name = self.options.fsync, self._child(process)
        local: dict[str, str] = {}
        values = parts.own(pieces, local, is_leader=process == 0)
        if (first := next(values, None)) is None:
            return Part(parts.digest(self.tree.plan), local, {}, is_written=False)
        child = location.make_child(self.item, name)
        numbered = not isinstance(child, Path)
        store = tensorstore_io.create_store(child, self.context, fsync=fsync, numbered=numbered)
        self._write_all(store, itertools.chain([first], values))
        if fsync and isinstance(child, Path):
            filesystem.fsync_directories(child)
        files = {f"{name}/{file}": found.size for file, found in files_of(child).items()}
        return Part(parts.digest(self.tree.plan), local, files, is_written=True)

    def merge(self, found: Sequence[Part], title: str) -> dict[str, SavedFile]:
        """Merges what all processes wrote; returns the files that it is in.

        Raises:
          ProcessFailedError: when they wrote different trees; `title` says what they did.
        """
        where = "" if self.tree.directory == layout.ITEM else f", {self.tree.directory}"
        parts.check_equal(found, title + where)
        store = tensorstore_io.create_store(self.item, self.context, fsync=self.options.fsync)
        children = [
            tensorstore_io.open_store(self.item / self._child(i), self.context)
            for i, part in enumerate(found)
            if part.is_written
        ]
        tensorstore_io.merge(store, children, self._small(), location.timeout_of(self.item))
        files = {n: f for n, f in files_of(self.item).items() if not n.startswith(layout.CHILD)}
        return {
            n: SavedFile(size, None) for part in found for n, size in part.files.items()
        } | files

    def write_metadata(self, files: dict[str, SavedFile], past: Sequence[PastSave]) -> None:
        """Writes all but the arrays, which are in `files`; the saves before are `past`."""
        plan, fsync = self.tree.plan, self.options.fsync
        # Where it cannot rely on a rename, Orbax wants a marker in the item too.
        marker = {layout.COMMIT_SUCCESS: layout.ITEM_MARKER} if self.is_marked else {}
        written = write_files(self.item, marker | self.tree.orbax_files, fsync=fsync)
        ours = with_files(plan.structure, self.attempt, files | written, past)
        data: dict[str, Any] = plan.orbax_members | {"flaxckpt": ours}
        location.write_file(self.item / layout.TREE_METADATA, sealed_json.seal(data), fsync=fsync)

    def _values(self, pieces: Iterable[Piece]) -> Iterator[tuple[str, bytes]]:
        """All keys and values of the key-value store; the small ones are known last."""
        for piece in pieces:
            yield from piece.encode()
        yield from self._small()

    def _small(self) -> tuple[tuple[str, bytes], ...]:
        """What is in the key-value store beside the chunks."""
        return (*self.tree.plan.array_metadata, (layout.ATTEMPT_KEY, self.attempt.encode()))

    def _child(self, process: int) -> str:
        """The directory of the database of one process."""
        return f"{layout.CHILD}{process}-{self.attempt}"

    def _write_all(self, store: ts.KvStore, values: Iterable[tuple[str, bytes]]) -> None:
        """Writes keys and values to `store`."""
        timeout_secs = location.timeout_of(self.item)
        tensorstore_io.write_all(store, values, self.options.buffer_bytes, timeout_secs)


def write_files(
    directory: Location, files: dict[str, bytes], *, fsync: bool
) -> dict[str, SavedFile]:
    """Writes files below `directory`; returns their sizes and checksums."""
    for name, data in files.items():
        path = directory / name
        if "/" in name and isinstance(path, Path):
            path.parent.mkdir(parents=True, exist_ok=True)
        location.write_file(path, data, fsync=fsync)
    return {name: SavedFile(len(data), crc32c.crc32c(data)) for name, data in files.items()}


def files_of(item: Location) -> dict[str, SavedFile]:
    """The files of a key-value store, whose contents carry checksums of their own.

    Of those in a bucket the sizes are not known, and the index has all that is needed of them.
    """
    if not isinstance(item, Path):
        return {}
    files = (path for path in sorted(item.rglob("*")) if path.is_file())
    return {str(path.relative_to(item)): SavedFile(path.stat().st_size, None) for path in files}
