"""The arguments and the output that commands share."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from flaxckpt.text import clean, size

if TYPE_CHECKING:
    from flaxckpt.options import Options


# Output: tables and lines for people, or one JSON document for programs.


class Column(NamedTuple):
    """A column of a table.

    Attributes:
      title: the title of the column.
      right: whether to align it to the right, as for numbers.
    """

    title: str
    right: bool = False


# The gap between two columns, and the least width of a text column on a narrow terminal.
_GAP, _LEAST = 2, 8


class Output:
    """Writes to stdout; progress goes to stderr.

    Attributes:
      is_json: whether to write the document, and not the tables and lines.
    """

    def __init__(self, *, is_json: bool):
        """Writes JSON if `is_json`, otherwise text."""
        self.is_json = is_json

    def document(self, data: Mapping[str, Any]) -> None:
        """Writes `data` if JSON was asked for; a command calls it once."""
        if self.is_json:
            import orjson

            _write(orjson.dumps(_plain(data), option=orjson.OPT_INDENT_2).decode() + "\n")

    def lines(self, *lines: str) -> None:
        """Writes lines for people, without empty ones."""
        if not self.is_json:
            _write("".join(f"{clean(line)}\n" for line in lines if line))

    def table(self, columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
        """Writes a table for people, without empty columns."""
        found = list(rows)
        if self.is_json or not found:
            return
        used = [i for i in range(len(columns)) if any(row[i] for row in found)]
        cells = [[clean(row[i]) for i in used] for row in found]
        shown = [columns[i] for i in used]
        _write_table(shown, [[column.title for column in shown], *cells])

    @contextlib.contextmanager
    def progress(self, title: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """Shows a progress bar on a terminal; gives a function that takes the bytes just done."""
        if not sys.stderr.isatty():
            yield lambda nbytes: None
            return
        from flaxckpt.progress import progress_bar

        with progress_bar() as bar:
            task = bar.add_task(clean(title), total=total)
            yield lambda nbytes: bar.advance(task, nbytes)


def _write_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Writes a table, truncated to the width of a terminal."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    if not sys.stdout.isatty():
        _write(_aligned(columns, rows, widths))
        return
    from rich.console import Console

    console = Console(file=sys.stdout)
    head, _, rest = _aligned(columns, rows, _fitted(columns, widths, console.width)).partition("\n")
    with console.capture() as captured:
        console.print(head, style="bold", markup=False, highlight=False, soft_wrap=True)
    # Rows have no style, because rich takes seconds for a few thousand of them.
    _write(captured.get() + rest)


def _fitted(columns: Sequence[Column], widths: Sequence[int], limit: int) -> list[int]:
    """Column widths for lines of at most `limit` characters.

    Only text columns are truncated, the first one last.
    """
    fitted = list(widths)
    excess = sum(widths) + _GAP * (len(widths) - 1) - limit
    for i in reversed(range(len(columns))):
        if not columns[i].right and excess > 0:
            cut = min(excess, max(0, fitted[i] - _LEAST))
            fitted[i], excess = fitted[i] - cut, excess - cut
    return fitted


def _aligned(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], widths: Sequence[int]
) -> str:
    """A table with columns of these widths; longer cells are truncated."""
    pads = [str.rjust if column.right else str.ljust for column in columns]
    cells = (
        [pad(_cut(cell, width), width) for pad, cell, width in zip(pads, row, widths, strict=True)]
        for row in rows
    )
    return "".join((" " * _GAP).join(row).rstrip() + "\n" for row in cells)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _write(text: str) -> None:
    """Writes to stdout, escaping characters that its encoding lacks."""
    stream: TextIO = sys.stdout
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))


def _plain(data: Any) -> Any:
    """`data` for JSON, which cannot represent NaN and infinities: they become strings."""
    if isinstance(data, Mapping):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    return data


class Clock:
    """Measures how long something takes."""

    def __init__(self) -> None:
        """Starts now."""
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """The seconds since it began."""
        return max(time.monotonic() - self._began, 1e-9)

    def speed(self, nbytes: int) -> str:
        """The speed at which `nbytes` were processed since it began."""
        return f"{size(int(nbytes / self.seconds))}/s"


# Exit codes, errors, and the arguments that several commands have.


# Exit codes: success; damage or differences were found; an error.
FINE, BAD, ERROR = 0, 1, 2

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kMGT]?)(i?)B?)?", re.IGNORECASE)


class CliError(Exception):
    """A command cannot do what it was asked to do; the message is for people."""


def add_common(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that every command has."""
    parser.add_argument("--json", action="store_true", help="write one JSON document to stdout")
    store = parser.add_argument_group("object stores (s3://, gs://)")
    store.add_argument("--endpoint", metavar="URL", help="endpoint of an S3-compatible server")
    store.add_argument("--region", help="region of the S3 bucket")
    store.add_argument(
        "--credentials",
        metavar="HOW",
        help="S3 credentials: environment, anonymous or profile:NAME",
    )


def add_metric(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that rank steps."""
    parser.add_argument(
        "--metric",
        metavar="NAME",
        help="metric that ranks the steps; by default the one that the run records",
    )
    parser.add_argument(
        "--mode",
        choices=("min", "max"),
        help="whether the smallest or the largest value is best; by default as the run records",
    )


def add_writing(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of commands that write a checkpoint."""
    parser.add_argument("--overwrite", action="store_true", help="replace an existing checkpoint")
    parser.add_argument(
        "--no-atomic-rename",
        action="store_true",
        help="for a bucket mounted as a directory: see Options(atomic_rename=False)",
    )


def options_of(args: argparse.Namespace) -> Options:
    """The options that the arguments give.

    Raises:
      CliError: if one of them is invalid.
    """
    from flaxckpt.options import ObjectStore, Options

    try:
        store = ObjectStore(args.endpoint, args.region, args.credentials)
    except ValueError as error:
        raise CliError(str(error)) from None
    return Options(storage=store, atomic_rename=not getattr(args, "no_atomic_rename", False))


def positive(text: str) -> int:
    """Parses a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def step_number(text: str) -> int:
    """Parses a step."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a step")
    return int(text)


def byte_count(text: str) -> int:
    """Parses a number of bytes.

    Example:
      >>> byte_count("5GB"), byte_count("1.5 MiB"), byte_count("4096")
      (5000000000, 1572864, 4096)
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB")
    power = " kmgt".index((found[2] or " ").lower())
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)
