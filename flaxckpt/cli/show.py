"""flaxckpt show."""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from flaxckpt import comparing, text
from flaxckpt.cli.command import FINE, CliError, Column, Output, options_of, positive
from flaxckpt.comparing import Branch, Item, branch_of, format_of, items_of, leaves_of, sort
from flaxckpt.leaves.dtypes import parse_dtype
from flaxckpt.source.checkpoint import Checkpoint, Source
from flaxckpt.source.leaf import Leaf
from flaxckpt.store.store import Location
from flaxckpt.tree.keypaths import selected

# What the values of arrays are like: smallest, largest, mean, norm, how many are no numbers.


@dataclasses.dataclass
class Stats:
    """What is known of the values of a leaf so far.

    NaN and infinities are counted, and are in none of the others. Complex numbers have no order
    and so only a norm.
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
        """Takes more values into account."""
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
        """Takes more finite values into account."""
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

    @property
    def mean(self) -> float | None:
        """The mean of the finite values."""
        return self._sum / self._finite if self._finite and not self.is_complex else None

    @property
    def norm(self) -> float:
        """The square root of the sum of the squares of the finite values."""
        return math.sqrt(self._squares)

    def document(self) -> dict[str, Any]:
        """All of it, for programs."""
        return {
            "min": self.least,
            "max": self.largest,
            "mean": self.mean,
            "norm": self.norm,
            "nan": self.nan,
            "inf": self.inf,
        }


def stats_of(source: Source, leaves: Sequence[Leaf]) -> dict[str, Stats]:
    """What the values of `leaves` are like, by name; of those that are numbers.

    Raises:
      CorruptCheckpointError: when something is missing or damaged; the leaf is named.
    """
    found: dict[str, Stats] = {}
    with source.unchanged():
        for block in comparing.read_blocks(comparing.wanted_blocks(filter(_is_number, leaves))):
            values = block.values
            found.setdefault(block.leaf.name, Stats()).add(_widened(values))
    return found


def _is_number(leaf: Leaf) -> bool:
    """Whether a leaf is numbers; the words of a random key are none."""
    is_key = leaf.spec.kind == "prng_key"
    return (
        not is_key and leaf.array is not None and comparing.is_number(parse_dtype(leaf.array.dtype))
    )


def _widened(values: np.ndarray) -> np.ndarray:
    """Integers of ml_dtypes as integers of numpy, which knows the smallest of them."""
    if values.dtype.kind == "V" and "int" in values.dtype.name:
        return values.astype(np.int64)
    return values


# All that a checkpoint holds, as `show` wants it.


@dataclasses.dataclass(frozen=True)
class Part:
    """The state, or an item.

    Attributes:
      item: the name of the item; `None` for the state.
      kind: of the item.
      files: the size of its files beside its tree.
      source: where its tree is.
      root: its tree, if it has one.
    """

    item: str | None
    kind: str
    files: int
    source: Source | None
    root: Branch | None

    @property
    def nbytes(self) -> int:
        """The size of all of it."""
        return self.files + (self.root.nbytes if self.root else 0)

    @property
    def leaves(self) -> list[Leaf]:
        """Its leaves."""
        found = [] if self.root is None else list(leaves_of(self.root))
        return found if self.root is not None and self.root.count else []

    def documents(
        self, whole: int, stats: Mapping[tuple[str, str], Stats]
    ) -> Iterator[dict[str, Any]]:
        """Its leaves for programs; all there is has `whole` bytes."""
        for leaf in self.leaves:
            found = stats.get((self.item or "", leaf.name))
            yield _contents_document(leaf, self.item, whole) | (
                {} if found is None else {"stats": found.document()}
            )


@dataclasses.dataclass(frozen=True)
class Content:
    """A checkpoint.

    Attributes:
      path: where it is.
      format: what its format is called.
      time: when it was committed, in seconds since 1970, if that is known.
      metrics: the user's metrics.
      metadata: the user's metadata.
      parts: the state and the items.
    """

    path: Location
    format: str
    time: float | None
    metrics: Mapping[str, float]
    metadata: Mapping[str, Any]
    parts: Sequence[Part]

    @property
    def count(self) -> int:
        """How many leaves it has."""
        return sum(part.root.count for part in self.parts if part.root is not None)

    @property
    def nbytes(self) -> int:
        """The size of all of it."""
        return sum(part.nbytes for part in self.parts)

    def stats(self) -> dict[tuple[str, str], Stats]:
        """What the values are like, by item (empty for the state) and name."""
        return {
            (part.item or "", name): found
            for part in self.parts
            if part.source is not None
            for name, found in stats_of(part.source, part.leaves).items()
        }


def content_of(source: Source, pattern: str | None, order: str | None) -> Content:
    """The leaves and items of `source`; with a `pattern`, the leaves that it selects."""
    is_wanted = None
    if pattern is not None:
        names = [leaf.name for leaf in source.leaves]
        is_wanted = selected(pattern, names, "--filter").__contains__
    parts = [Part(None, "", 0, source, branch_of(source, is_wanted))]
    parts += map(_part, items_of(source)) if pattern is None else []
    for part in parts:
        if order is not None and part.root is not None:
            sort(part.root, order)
    if not isinstance(source, Checkpoint):
        return Content(source.path, format_of(source), None, {}, {}, parts)
    described = source.described
    seconds = described.committed_ns / 1e9
    return Content(source.path, "flaxckpt", seconds, described.metrics, described.metadata, parts)


def _part(item: Item) -> Part:
    """An item."""
    root = None if item.tree is None else branch_of(item.tree)
    return Part(item.name, item.kind, item.nbytes, item.tree, root)


def _contents_document(leaf: Leaf, item: str | None, whole: int) -> dict[str, Any]:
    """A leaf for programs."""
    spec, array = leaf.spec, leaf.array
    nbytes = leaf.nbytes
    return {
        "name": leaf.name,
        "item": item,
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
    }


# `flaxckpt show PATH`: the tree of a checkpoint, of any format.


_COLUMNS = (
    Column("NAME"),
    Column("TYPE"),
    Column("SHARDING"),
    Column("SIZE", right=True),
    Column("SHARE", right=True),
)
_STATS = ("min", "max", "mean", "norm", "nan", "inf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    parser.add_argument("path", metavar="PATH", help="a checkpoint of any format, or its URL")
    parser.add_argument("--depth", metavar="N", type=positive, help="only so many levels")
    parser.add_argument(
        "--filter",
        metavar="PATTERN",
        help="show only the leaves that it selects, as in params/.*",
    )
    parser.add_argument("--sort", choices=("size", "name"), help="by default as it was saved")
    parser.add_argument("--stats", action="store_true", help="reads the values and describes them")


def run(args: argparse.Namespace, out: Output) -> int:
    """Shows the tree."""
    from flaxckpt.formats.opening import open_source

    source = open_source(args.path, options_of(args))
    content = content_of(source, args.filter, args.sort)
    if args.filter is not None and not content.count:
        raise CliError(f"no leaf of {source.path} fits {args.filter}")
    stats = content.stats() if args.stats else {}
    out.document(_document(content, stats))
    out.lines(*_head(content), "")
    columns = (*_COLUMNS, *(Column(name.upper(), right=True) for name in _STATS if args.stats))
    out.table(columns, (r for p in content.parts for r in _rows(p, content, stats, args.depth)))
    out.lines(f"{text.plural(content.count, 'leaf')}, {text.size(content.nbytes)}")
    return FINE


def _head(content: Content) -> Iterator[str]:
    """What is said before the tree."""
    seconds = content.time
    age = "" if seconds is None else f", {text.age(time.time() - seconds)} old"
    yield f"{content.path}: {content.format}{age}"
    yield f"metrics: {text.metrics(content.metrics)}" if content.metrics else ""
    yield f"metadata: {text.short(str(content.metadata))}" if content.metadata else ""


Statistics = Mapping[tuple[str, str], "Stats"]


def _rows(
    part: Part, content: Content, stats: Statistics, limit: int | None
) -> Iterator[list[str]]:
    """The rows of the state, or of an item."""
    is_cut = part.item is not None and limit == 1
    if part.item is not None:
        kind = (
            f"{part.kind} ({text.plural(part.root.count, 'leaf')})" if part.root and is_cut else ""
        )
        sizes = [text.size(part.nbytes), text.share(part.nbytes, content.nbytes)]
        yield [f"item {part.item}", kind or part.kind, "", *sizes, *_numbers(None, stats)]
    if part.root is None or is_cut:
        return
    is_bare = not part.root.key and part.root.leaf is None
    branches = part.root.children if is_bare else [part.root]
    for branch in branches:
        yield from _branch_rows(branch, part, content, stats, limit, int(part.item is not None))


def _branch_rows(
    branch: Branch,
    part: Part,
    content: Content,
    stats: Statistics,
    limit: int | None,
    depth: int,
) -> Iterator[list[str]]:
    """The row of a branch, and those below it down to `limit`."""
    is_cut = limit is not None and depth + 1 >= limit and bool(branch.children)
    leaf = branch.leaf
    sharding = "" if leaf is None or leaf.array is None else text.sharding(leaf.array.sharding)
    yield [
        "  " * depth + (branch.key or "(the whole tree)"),
        _type_of(branch, is_cut),
        sharding,
        text.size(branch.nbytes) if branch.nbytes else "-",
        text.share(branch.nbytes, content.nbytes) if branch.nbytes else "-",
        *_numbers(None if leaf is None else stats.get((part.item or "", leaf.name)), stats),
    ]
    for child in () if is_cut else branch.children:
        yield from _branch_rows(child, part, content, stats, limit, depth + 1)


def _type_of(branch: Branch, is_cut: bool) -> str:
    """What stands in the column of types."""
    if branch.leaf is not None:
        value = branch.leaf.value
        shown = f" {text.short(repr(value))}" if isinstance(value, str) else ""
        return f"{branch.leaf.spec}{shown}"
    assert branch.node is not None, "it is no leaf"
    name = text.class_of(branch.node.kind, branch.node.class_name)
    if not branch.children:
        return f"{name or branch.node.kind} (empty)"
    return f"{name} ({text.plural(branch.count, 'leaf')})".strip() if is_cut else name


def _numbers(found: Stats | None, stats: Statistics) -> list[str]:
    """The cells that describe the values of a leaf."""
    if not stats:
        return []
    values = {} if found is None else found.document()
    return ["" if found is None else text.number(values[name]) for name in _STATS]


def _document(content: Content, stats: Statistics) -> dict[str, Any]:
    """The answer for programs."""
    return {
        "path": str(content.path),
        "format": content.format,
        "time": content.time,
        "metrics": dict(content.metrics),
        "metadata": dict(content.metadata),
        "nbytes": content.nbytes,
        "items": [
            {"name": part.item, "kind": part.kind, "nbytes": part.nbytes}
            for part in content.parts
            if part.item is not None
        ],
        "leaves": [
            leaf for part in content.parts for leaf in part.documents(content.nbytes, stats)
        ],
    }
