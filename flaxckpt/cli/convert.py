"""flaxckpt convert."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from flaxckpt import comparing, text
from flaxckpt.cli.command import FINE, Clock, Output, add_writing, options_of
from flaxckpt.comparing import format_of
from flaxckpt.errors import ItemError
from flaxckpt.leaves import kinds
from flaxckpt.options import Options
from flaxckpt.saving.save import PartialSave
from flaxckpt.sharding.chunks import whole
from flaxckpt.source.checkpoint import Checkpoint, Source
from flaxckpt.source.leaf import Leaf
from flaxckpt.store.store import Location
from flaxckpt.tree.keypaths import parse_name
from flaxckpt.tree.node import Node, named_nodes
from flaxckpt.tree.rebuild import build

# Rewriting a checkpoint of any format as one of flaxckpt, some leaves at a time.


Advance = Callable[[int], None]

# Leaves are handed over together until they have so many bytes.
PART_BYTES = 32 << 20


def convert_checkpoint(
    source: Source, final: Location, options: Options, advance: Advance, *, overwrite: bool
) -> int:
    """Writes `source` to `final`, with the same names and dicts for containers; counts leaves.

    Raises:
      ItemError: when it has items, which only a copy keeps.
      CorruptCheckpointError: when it is damaged; nothing is at `final` then.
    """
    metadata: dict[str, Any] = {"converted_from": str(source.path), "format": format_of(source)}
    if isinstance(source, Checkpoint):
        if source.described.items:
            raise ItemError(f"{source.path} has items, which only flaxckpt cp keeps. Use that.")
        metadata |= source.described.metadata
    saving = PartialSave(final, overwrite=overwrite, metadata=metadata, options=options)
    with saving as parts, source.unchanged():
        for part in _parts(source, advance):
            parts.add(part)
    return len(source.leaves)


def _parts(source: Source, advance: Advance) -> Iterator[Any]:
    """The tree in dicts of dicts, no leaf twice."""
    part, size = _Part(), 0
    for name, value in _values(source):
        nbytes = getattr(value, "nbytes", 0)
        if size and size + nbytes > PART_BYTES:
            yield part.tree
            part, size = _Part(), 0
        part.put(name, value)
        size += nbytes
        advance(nbytes)
    yield part.tree


class _Part:
    """A part of a tree, in dicts of dicts."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.tree: Any = {}

    def put(self, name: str, value: Any) -> None:
        """Puts `value` where `name` says; without a name it is all there is."""
        *path, last = parse_name(name) or (None,)
        if not name:
            self.tree = value
            return
        node = self.tree
        for key in path:
            node = node.setdefault(key, {})
        node[last] = value


def _values(source: Source) -> Iterator[tuple[str, Any]]:
    """The leaves with their names and values, and the nodes in which there is nothing."""
    for name, node in named_nodes(source.nodes):
        if node is not None and not node.keys:
            yield name, _empty(node)
    arrays = [(leaf, whole(leaf.array.shape)) for leaf in source.leaves if leaf.array is not None]
    for block in comparing.read_blocks(arrays):
        yield block.leaf.name, _decoded(block.leaf, block.values)
    for leaf in source.leaves:
        if leaf.array is None:
            yield leaf.name, kinds.decode(leaf.spec, leaf.value, leaf.name)


def _empty(node: Node) -> Any:
    """A node without children, as far as it can be built."""
    return build([node], [])


def _decoded(leaf: Leaf, values: np.ndarray) -> Any:
    """The value of a leaf that has an array; jax arrays stay on the host."""
    if leaf.spec.kind in ("jax", "numpy"):
        return values
    stored = jax.numpy.asarray(values) if leaf.spec.kind == "prng_key" else values
    return kinds.decode(leaf.spec, stored, leaf.name)


# `flaxckpt convert A B`: a checkpoint of any format as one of flaxckpt.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    parser.add_argument("a", metavar="A", help="a checkpoint of any format, or its URL")
    parser.add_argument("b", metavar="B", help="where that of flaxckpt shall be")
    add_writing(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    """Writes what is at A to B."""
    from flaxckpt.comparing import format_of
    from flaxckpt.formats.opening import open_source
    from flaxckpt.store.store import locate

    options, clock = options_of(args), Clock()
    source, final = open_source(args.a, options), locate(args.b, options)
    nbytes = sum(leaf.nbytes for leaf in source.leaves)
    with out.progress(str(source.path), nbytes) as advance:
        count = convert_checkpoint(source, final, options, advance, overwrite=args.overwrite)
    out.document(
        {
            "from": str(source.path),
            "to": str(final),
            "format": format_of(source),
            "leaves": count,
            "nbytes": nbytes,
        }
    )
    speed = f"{text.size(nbytes)}, {text.size(int(nbytes / clock.seconds))}/s"
    what = f"{text.plural(count, 'leaf')}, {speed}"
    out.lines(f"{source.path} ({format_of(source)}) -> {final}: {what}")
    return FINE
