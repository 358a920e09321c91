"""`flaxckpt convert A B`: rewrites a checkpoint of any format in the format of flaxckpt."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from flaxckpt import text
from flaxckpt.cli.command import FINE, Clock, Output, add_writing, options_of
from flaxckpt.comparing import read_blocks
from flaxckpt.errors import ItemError
from flaxckpt.formats.opening import open_source
from flaxckpt.inspecting import format_of
from flaxckpt.leaves import kinds
from flaxckpt.saving.save import PartialSave
from flaxckpt.sharding.chunks import whole
from flaxckpt.source.checkpoint import Checkpoint, Source
from flaxckpt.source.leaf import Leaf
from flaxckpt.store.locate import locate
from flaxckpt.tree.keypaths import parse_name
from flaxckpt.tree.node import named_nodes
from flaxckpt.tree.rebuild import build

# How many bytes of leaves are written together.
PART_BYTES = 32 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `convert`."""
    parser.add_argument("a", metavar="A", help="path or URL of a checkpoint of any format")
    parser.add_argument("b", metavar="B", help="path or URL of the new checkpoint")
    add_writing(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    """Writes the checkpoint at A to B, with the same names, and dicts for containers.

    Raises:
      ItemError: if it has items, which only a copy keeps.
      CorruptCheckpointError: if it is damaged; then nothing is at B.
    """
    options, clock = options_of(args), Clock()
    source, final = open_source(args.a, options), locate(args.b, options)
    nbytes, count = sum(leaf.nbytes for leaf in source.leaves), len(source.leaves)
    metadata: dict[str, Any] = {"converted_from": str(source.path), "format": format_of(source)}
    if isinstance(source, Checkpoint):
        if source.described.items:
            raise ItemError(f"{source.path} has items, which only flaxckpt cp keeps. Use that.")
        metadata |= source.described.metadata
    saving = PartialSave(final, overwrite=args.overwrite, metadata=metadata, options=options)
    with out.progress(str(source.path), nbytes) as advance, saving as parts, source.unchanged():
        for part in _parts(source, advance):
            parts.add(part)
    out.document(
        {
            "from": str(source.path),
            "to": str(final),
            "format": format_of(source),
            "leaves": count,
            "nbytes": nbytes,
        }
    )
    done = f"{text.plural(count, 'leaf')}, {text.size(nbytes)}, {clock.speed(nbytes)}"
    out.lines(f"{source.path} ({format_of(source)}) -> {final}: {done}")
    return FINE


def _parts(source: Source, advance: Callable[[int], None]) -> Iterator[Any]:
    """The tree as dicts of dicts of about `PART_BYTES` each, with every leaf in one of them."""
    part: Any = {}
    size = 0
    for name, value in _values(source):
        nbytes = getattr(value, "nbytes", 0)
        if size and size + nbytes > PART_BYTES:
            yield part
            part, size = {}, 0
        part = _put(part, name, value)
        size += nbytes
        advance(nbytes)
    yield part


def _put(tree: Any, name: str, value: Any) -> Any:
    """`tree` with `value` at the key path `name`; without a name `value` is the tree."""
    if not name:
        return value
    *path, last = parse_name(name)
    node = tree
    for key in path:
        node = node.setdefault(key, {})
    node[last] = value
    return tree


def _values(source: Source) -> Iterator[tuple[str, Any]]:
    """The empty nodes and the leaves, with their key paths."""
    for name, node in named_nodes(source.nodes):
        if node is not None and not node.keys:
            yield name, build([node], [])
    arrays = [(leaf, whole(leaf.array.shape)) for leaf in source.leaves if leaf.array is not None]
    for block in read_blocks(arrays):
        yield block.leaf.name, _decoded(block.leaf, block.values)
    for leaf in source.leaves:
        if leaf.array is None:
            yield leaf.name, kinds.decode(leaf.spec, leaf.value, leaf.name)


def _decoded(leaf: Leaf, values: np.ndarray) -> Any:
    """The value of a leaf with an array; jax arrays stay numpy arrays, on the host."""
    if leaf.spec.kind in ("jax", "numpy"):
        return values
    stored = jax.numpy.asarray(values) if leaf.spec.kind == "prng_key" else values
    return kinds.decode(leaf.spec, stored, leaf.name)
