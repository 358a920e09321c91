"""`flaxckpt show PATH`: the tree of a checkpoint, of any format."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from flaxckpt.cli import text
from flaxckpt.cli.command import FINE, CliError, Command, options_of, positive
from flaxckpt.cli.output import Column, Output

if TYPE_CHECKING:
    from flaxckpt.cli.work.contents import Content, Part
    from flaxckpt.cli.work.stats import Stats
    from flaxckpt.cli.work.trees import Branch

_COLUMNS = (
    Column("NAME"),
    Column("TYPE"),
    Column("SHARDING"),
    Column("SIZE", right=True),
    Column("SHARE", right=True),
)
_STATS = ("min", "max", "mean", "norm", "nan", "inf")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    parser.add_argument("path", metavar="PATH", help="a checkpoint of any format, or its URL")
    parser.add_argument("--depth", metavar="N", type=positive, help="only so many levels")
    parser.add_argument(
        "--filter", metavar="GLOB", help="only the leaves of the state that fit, as in params/**"
    )
    parser.add_argument("--sort", choices=("size", "name"), help="by default as it was saved")
    parser.add_argument("--stats", action="store_true", help="reads the values and describes them")


def _run(args: argparse.Namespace, out: Output) -> int:
    """Shows the tree."""
    from flaxckpt.cli.work.contents import content_of
    from flaxckpt.opening import open_source

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


COMMAND = Command("show", "shows the tree of a checkpoint of any format", _add_arguments, _run)
