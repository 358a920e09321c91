"""`flaxckpt show PATH`: the tree of a checkpoint of any format."""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from flaxckpt import comparing, text
from flaxckpt.cli.command import FINE, CliError, Column, Output, options_of, positive
from flaxckpt.formats.opening import open_source
from flaxckpt.inspecting import Branch, branch_of, format_of, items_of, leaves_of, sort
from flaxckpt.leaves.dtypes import parse_dtype
from flaxckpt.source.checkpoint import Checkpoint, Source
from flaxckpt.source.leaf import Leaf
from flaxckpt.tree.keypaths import selected

_COLUMNS = (
    Column("NAME"),
    Column("TYPE"),
    Column("SHARDING"),
    Column("SIZE", right=True),
    Column("SHARE", right=True),
)
_STATS = ("min", "max", "mean", "norm", "nan", "inf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `show`."""
    parser.add_argument("path", metavar="PATH", help="path or URL of a checkpoint of any format")
    parser.add_argument("--depth", metavar="N", type=positive, help="show at most N levels")
    parser.add_argument(
        "--filter", metavar="PATTERN", help="show only the leaves of the state that match"
    )
    parser.add_argument("--sort", choices=("size", "name"), help="order; by default as saved")
    parser.add_argument("--stats", action="store_true", help="read the arrays and describe them")


def run(args: argparse.Namespace, out: Output) -> int:
    """Shows the tree."""
    source = open_source(args.path, options_of(args))
    names = [leaf.name for leaf in source.leaves]
    is_wanted = args.filter and selected(args.filter, names, "--filter").__contains__
    parts = [ShownTree(None, "", 0, source, branch_of(source, is_wanted))]
    for item in items_of(source) if args.filter is None else ():
        root = None if item.tree is None else branch_of(item.tree)
        parts.append(ShownTree(item.name, item.kind, item.nbytes, item.tree, root))
    leaves = [leaf for part in parts for leaf in part.leaves]
    if args.filter is not None and not leaves:
        raise CliError(f"no leaf of {source.path} matches {args.filter}")
    for part in parts:
        if args.sort is not None and part.root is not None:
            sort(part.root, args.sort)
        if args.stats and part.source is not None:
            part.stats.update(stats_of(part.source, part.leaves))
    nbytes = sum(part.nbytes for part in parts)
    described = source.described if isinstance(source, Checkpoint) else None
    seconds = described.committed_ns / 1e9 if described else None
    metrics = dict(described.metrics) if described else {}
    metadata = dict(described.metadata) if described else {}
    items = [part for part in parts if part.item is not None]
    out.document(
        {
            "path": str(source.path),
            "format": format_of(source),
            "time": seconds,
            "metrics": metrics,
            "metadata": metadata,
            "nbytes": nbytes,
            "items": [{"name": i.item, "kind": i.kind, "nbytes": i.nbytes} for i in items],
            "leaves": [_document(leaf, part, nbytes) for part in parts for leaf in part.leaves],
        }
    )
    age = "" if seconds is None else f", {text.age(time.time() - seconds)} old"
    out.lines(
        f"{source.path}: {format_of(source)}{age}",
        f"metrics: {text.metrics(metrics)}" if metrics else "",
        f"metadata: {text.short(str(metadata))}" if metadata else "",
    )
    columns = (*_COLUMNS, *(Column(name.upper(), right=True) for name in _STATS if args.stats))
    out.table(columns, (row for part in parts for row in _rows(part, nbytes, args)))
    out.lines(f"{text.plural(len(leaves), 'leaf')}, {text.size(nbytes)}")
    return FINE


@dataclasses.dataclass
class ShownTree:
    """The state (`item` is `None`) or an item; `stats` by the key path of a leaf."""

    item: str | None
    kind: str
    files_nbytes: int
    source: Source | None
    root: Branch | None
    stats: dict[str, ArrayStats] = dataclasses.field(default_factory=dict)

    @property
    def leaves(self) -> list[Leaf]:
        """The leaves to show."""
        return list(leaves_of(self.root)) if self.root is not None and self.root.count else []

    @property
    def nbytes(self) -> int:
        """The size of its files and arrays."""
        return self.files_nbytes + (0 if self.root is None else self.root.nbytes)


def _rows(part: ShownTree, nbytes: int, args: argparse.Namespace) -> Iterator[list[str]]:
    """The rows of the state or of an item; the whole checkpoint has `nbytes`."""
    is_item, root = part.item is not None, part.root
    is_cut = is_item and args.depth == 1
    if is_item:
        count = f" ({text.plural(root.count, 'leaf')})" if root is not None and is_cut else ""
        sizes = [text.size(part.nbytes), text.share(part.nbytes, nbytes)]
        yield [f"item {part.item}", f"{part.kind}{count}", "", *sizes, *_numbers(None, args)]
    if root is None or is_cut:
        return
    for branch in root.children if not root.key and root.leaf is None else [root]:
        yield from _branch_rows(branch, part, nbytes, args, int(is_item))


def _branch_rows(
    branch: Branch, part: ShownTree, nbytes: int, args: argparse.Namespace, depth: int
) -> Iterator[list[str]]:
    is_cut = args.depth is not None and depth + 1 >= args.depth and bool(branch.children)
    yield [
        "  " * depth + (branch.key or "(the whole tree)"),
        branch.type(folded=is_cut),
        branch.sharding,
        text.size(branch.nbytes) if branch.nbytes else "-",
        text.share(branch.nbytes, nbytes) if branch.nbytes else "-",
        *_numbers(None if branch.leaf is None else part.stats.get(branch.leaf.name), args),
    ]
    for child in () if is_cut else branch.children:
        yield from _branch_rows(child, part, nbytes, args, depth + 1)


def _numbers(found: ArrayStats | None, args: argparse.Namespace) -> list[str]:
    """The cells with statistics."""
    if not args.stats:
        return []
    values = {} if found is None else found.document()
    return ["" if found is None else text.number(values[name]) for name in _STATS]


def _document(leaf: Leaf, part: ShownTree, whole: int) -> dict[str, Any]:
    spec, array = leaf.spec, leaf.array
    nbytes = leaf.nbytes
    found = part.stats.get(leaf.name)
    return {
        "name": leaf.name,
        "item": part.item,
        "type": str(spec),
        "kind": spec.kind,
        "dtype": spec.dtype or (array.dtype if array is not None else None),
        "shape": list(spec.shape),
        "impl": spec.impl or None,
        "nbytes": nbytes,
        "share": nbytes / whole if whole else 0.0,
        "chunks": None if array is None else list(array.chunks),
        "sharding": None if array is None else array.sharding,
        "value": leaf.value if array is None else None,
        **({} if found is None else {"stats": found.document()}),
    }


# Statistics of the values of arrays (`--stats`).


@dataclasses.dataclass
class ArrayStats:
    """Statistics of the values of a leaf.

    NaN and infinities are counted, and left out of the other statistics. Complex numbers only have
    a norm, because they have no order.
    """

    least: Any = None
    largest: Any = None
    nan: int = 0
    inf: int = 0
    is_complex: bool = False
    _finite: int = 0
    _sum: float = 0.0
    _squares: float = 0.0

    def add(self, values: np.ndarray) -> None:
        """Adds the values of a block."""
        self.is_complex = values.dtype.kind == "c"
        if values.dtype.kind in "iu":
            finite = values
        else:
            values = values.astype(np.complex128 if self.is_complex else np.float64, copy=False)
            finite = values[np.isfinite(values)]
            nan = int(np.isnan(values).sum())
            self.nan += nan
            self.inf += values.size - finite.size - nan
        if finite.size:
            self._add(finite)

    def _add(self, values: np.ndarray) -> None:
        sizes = np.abs(values) if self.is_complex else values.astype(np.float64, copy=False)
        with np.errstate(over="ignore"):
            self._squares += float(np.sum(np.square(sizes)))
        self._finite += values.size
        if self.is_complex:
            return
        least, largest = values.min().item(), values.max().item()
        self.least = least if self.least is None else min(self.least, least)
        self.largest = largest if self.largest is None else max(self.largest, largest)
        self._sum += float(np.sum(sizes))

    def document(self) -> dict[str, Any]:
        """The statistics by name, as `--json` writes them."""
        mean = self._sum / self._finite if self._finite and not self.is_complex else None
        return {
            "min": self.least,
            "max": self.largest,
            "mean": mean,
            "norm": math.sqrt(self._squares),
            "nan": self.nan,
            "inf": self.inf,
        }


def stats_of(source: Source, leaves: Iterable[Leaf]) -> dict[str, ArrayStats]:
    """The statistics of the leaves that are numbers, by key path.

    Raises:
      CorruptCheckpointError: if something is missing or damaged; it names the leaf.
    """
    found: dict[str, ArrayStats] = {}
    numbers = [
        leaf
        for leaf in leaves
        if leaf.array is not None
        and leaf.spec.kind != "prng_key"  # whose words are not numbers
        and comparing.is_number(parse_dtype(leaf.array.dtype))
    ]
    with source.unchanged():
        for block in comparing.read_blocks(comparing.blocks_of(numbers)):
            found.setdefault(block.leaf.name, ArrayStats()).add(_widened(block.values))
    return found


def _widened(values: np.ndarray) -> np.ndarray:
    """`values`, with integers of ml_dtypes as int64, because numpy has no minimum of them."""
    if values.dtype.kind == "V" and "int" in values.dtype.name:
        return values.astype(np.int64)
    return values
