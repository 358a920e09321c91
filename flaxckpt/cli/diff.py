"""`flaxckpt diff A B`: how two checkpoints differ, of any formats."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from flaxckpt import text
from flaxckpt.cli.command import BAD, FINE, Column, Output, options_of

if TYPE_CHECKING:
    from flaxckpt.comparing import Change


_STRUCTURE = (
    Column("ONLY IN"),
    Column("NAME"),
    Column("TYPE"),
)
_CHANGED = (
    Column("CHANGED"),
    Column("TYPE"),
    Column("ELEMENTS", right=True),
    Column("MAX ABS", right=True),
    Column("MAX REL", right=True),
)


class _Difference(NamedTuple):
    """What is not the same: names with what is there, and leaves whose values differ."""

    only_in_a: Mapping[str, str]
    only_in_b: Mapping[str, str]
    other_type: Mapping[str, tuple[str, str]]
    changed: Sequence[Change]
    equal: int | None

    @property
    def is_empty(self) -> bool:
        """Whether all is the same."""
        return not (self.only_in_a or self.only_in_b or self.other_type or self.changed)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    parser.add_argument("a", metavar="A", help="a checkpoint of any format, or its URL")
    parser.add_argument("b", metavar="B", help="another one")
    parser.add_argument(
        "--no-values", action="store_true", help="only what there is; reads no array"
    )


def run(args: argparse.Namespace, out: Output) -> int:
    """Says how two checkpoints differ."""
    from flaxckpt.formats.opening import open_source

    options = options_of(args)
    a, b = open_source(args.a, options), open_source(args.b, options)
    found = _difference(a, b, values=not args.no_values)
    out.document({"a": str(a.path), "b": str(b.path), **_document(found)})
    out.table(_STRUCTURE, _structure_rows(found))
    out.table(_CHANGED, map(_changed_row, found.changed))
    out.lines(_summary(found))
    return FINE if found.is_empty else BAD


def _difference(a: Any, b: Any, *, values: bool) -> _Difference:
    """How two opened checkpoints differ."""
    from flaxckpt.comparing import changes, trees_of

    (ours, our_items), (theirs, their_items) = trees_of(a), trees_of(b)
    first = _named(ours) | {name: item.kind for name, item in our_items.items()}
    second = _named(theirs) | {name: item.kind for name, item in their_items.items()}
    common = first.keys() & second.keys()
    other = {n: (first[n], second[n]) for n in first if n in common and first[n] != second[n]}
    found: list[Change] = []
    if values:
        trees = {tree.prefix: tree for tree in theirs}
        found = [c for t in ours if t.prefix in trees for c in changes(t, trees[t.prefix])]
        found += _files(our_items, their_items)
    return _Difference(
        {name: what for name, what in first.items() if name not in common},
        {name: what for name, what in second.items() if name not in common},
        other,
        sorted((c for c in found if c.changed), key=lambda change: change.order),
        sum(not c.changed for c in found) if values else None,
    )


def _named(trees: Sequence[Any]) -> dict[str, str]:
    """What is at each name of some trees."""
    return {t.prefix + name: entry.what for t in trees for name, entry in t.entries.items()}


def _files(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Change]:
    """The items on both sides that have files, with whether these differ, by their checksums."""
    from flaxckpt.comparing import Change

    return [
        Change(name, item.kind, changed=int(item.checksums != theirs[name].checksums))
        for name, item in ours.items()
        if name in theirs and item.kind == theirs[name].kind and item.checksums
    ]


def _structure_rows(found: _Difference) -> list[list[str]]:
    """A row for each name that one side lacks, or has as something else."""
    return [
        *(["A", name, what] for name, what in found.only_in_a.items()),
        *(["B", name, what] for name, what in found.only_in_b.items()),
        *(["(both)", name, f"{a} in A, {b} in B"] for name, (a, b) in found.other_type.items()),
    ]


def _changed_row(change: Change) -> list[str]:
    """A row for a leaf whose values differ."""
    return [
        change.name,
        change.what,
        f"{change.changed} of {change.count}",
        text.number(change.max_abs),
        text.number(change.max_rel),
    ]


def _summary(found: _Difference) -> str:
    """The last line."""
    counts = [
        f"{len(found.only_in_a)} only in A",
        f"{len(found.only_in_b)} only in B",
        f"{len(found.other_type)} of another type",
    ]
    if found.equal is not None:
        counts += [f"{len(found.changed)} changed", f"{found.equal} equal"]
    return ", ".join(counts)


def _document(found: _Difference) -> dict[str, Any]:
    """The answer for programs."""
    return {
        "same": found.is_empty,
        "only_in_a": [{"name": n, "type": what} for n, what in found.only_in_a.items()],
        "only_in_b": [{"name": n, "type": what} for n, what in found.only_in_b.items()],
        "other_type": [{"name": n, "a": a, "b": b} for n, (a, b) in found.other_type.items()],
        "changed": [
            {
                "name": change.name,
                "type": change.what,
                "elements": change.count,
                "changed_elements": change.changed,
                "max_abs": change.max_abs,
                "max_rel": change.max_rel,
            }
            for change in found.changed
        ],
        "equal": found.equal,
    }
