"""`flaxckpt diff A B`: how two checkpoints differ, of any formats."""

from __future__ import annotations

import argparse

from flaxckpt import text
from flaxckpt.cli.command import BAD, FINE, Column, Output, options_of

_STRUCTURE = (Column("ONLY IN"), Column("NAME"), Column("TYPE"))
_CHANGED = (
    Column("CHANGED"),
    Column("TYPE"),
    Column("ELEMENTS", right=True),
    Column("MAX ABS", right=True),
    Column("MAX REL", right=True),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `diff`."""
    parser.add_argument("a", metavar="A", help="path or URL of a checkpoint of any format")
    parser.add_argument("b", metavar="B", help="path or URL of another checkpoint")
    parser.add_argument(
        "--no-values", action="store_true", help="compare names and types only; read no arrays"
    )


def run(args: argparse.Namespace, out: Output) -> int:
    """Compares two checkpoints; the exit code is 1 if they differ."""
    from flaxckpt.comparing import compare
    from flaxckpt.formats.opening import open_source

    options = options_of(args)
    a, b = open_source(args.a, options), open_source(args.b, options)
    found = compare(a, b, values=not args.no_values)
    out.document(
        {
            "a": str(a.path),
            "b": str(b.path),
            "same": found.is_same,
            "only_in_a": [{"name": n, "type": what} for n, what in found.only_in_a.items()],
            "only_in_b": [{"name": n, "type": what} for n, what in found.only_in_b.items()],
            "other_type": [{"name": n, "a": x, "b": y} for n, (x, y) in found.other_type.items()],
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
    )
    rows = [
        *(["A", name, what] for name, what in found.only_in_a.items()),
        *(["B", name, what] for name, what in found.only_in_b.items()),
        *(["(both)", name, f"{x} in A, {y} in B"] for name, (x, y) in found.other_type.items()),
    ]
    out.table(_STRUCTURE, rows)
    changed = [
        [
            change.name,
            change.what,
            f"{change.changed} of {change.count}",
            text.number(change.max_abs),
            text.number(change.max_rel),
        ]
        for change in found.changed
    ]
    out.table(_CHANGED, changed)
    counts = [
        f"{len(found.only_in_a)} only in A",
        f"{len(found.only_in_b)} only in B",
        f"{len(found.other_type)} of another type",
    ]
    if found.equal is not None:
        counts += [f"{len(found.changed)} changed", f"{found.equal} equal"]
    out.lines(", ".join(counts))
    return FINE if found.is_same else BAD
