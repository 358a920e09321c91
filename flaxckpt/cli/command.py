"""What all commands share: arguments and output."""

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


# What commands write: tables and lines for people, or one JSON document for programs.


class Column(NamedTuple):
    """A column of a table.

    Attributes:
      title: its title.
      right: whether it is aligned to the right, as numbers are.
    """

    title: str
    right: bool = False


# Between two columns; and what is left of text where the terminal is narrow.
_GAP, _LEAST = 2, 8


class Output:
    """Writes to stdout; progress goes to stderr.

    Attributes:
      is_json: whether a document is wanted; tables and lines are then not written.
    """

    def __init__(self, *, is_json: bool):
        """Writes a document, or text for people."""
        self.is_json = is_json

    def document(self, data: Mapping[str, Any]) -> None:
        """Writes `data`, when a document is wanted; a command calls it once."""
        if self.is_json:
            import orjson

            _write(orjson.dumps(_plain(data), option=orjson.OPT_INDENT_2).decode() + "\n")

    def lines(self, *lines: str) -> None:
        """Writes lines for people; what is empty is left out."""
        if not self.is_json:
            _write("".join(f"{clean(line)}\n" for line in lines if line))

    def table(self, columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
        """Writes a table for people, without the columns that would be empty."""
        found = list(rows)
        if self.is_json or not found:
            return
        used = [i for i in range(len(columns)) if any(row[i] for row in found)]
        cells = [[clean(row[i]) for i in used] for row in found]
        shown = [columns[i] for i in used]
        _write_table(shown, [[column.title for column in shown], *cells])

    @contextlib.contextmanager
    def progress(self, title: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """A bar while the block runs, on a terminal; it gives what takes the bytes as they come."""
        if not sys.stderr.isatty():
            yield lambda nbytes: None
            return
        with _bar() as bar:
            task = bar.add_task(clean(title), total=total)
            yield lambda nbytes: bar.advance(task, nbytes)


def _bar() -> Any:
    """A bar with the bytes, how many a second, and the time that is left."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _write_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Writes a table, cut to the width of the terminal if there is one."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    if not sys.stdout.isatty():
        _write(_aligned(columns, rows, widths))
        return
    from rich.console import Console

    console = Console(file=sys.stdout)
    head, _, rest = _aligned(columns, rows, _fitted(columns, widths, console.width)).partition("\n")
    with console.capture() as captured:
        console.print(head, style="bold", markup=False, highlight=False, soft_wrap=True)
    # The rest has no style, and rich takes seconds for some thousand rows.
    _write(captured.get() + rest)


def _fitted(columns: Sequence[Column], widths: Sequence[int], limit: int) -> list[int]:
    """The widths of columns of a table that has at most `limit` characters in a line.

    Text gives way, the first column last; numbers are never cut.
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
    """A table with columns of such widths; what is longer is cut."""
    pads = [str.rjust if column.right else str.ljust for column in columns]
    cells = (
        [pad(_cut(cell, width), width) for pad, cell, width in zip(pads, row, widths, strict=True)]
        for row in rows
    )
    return "".join((" " * _GAP).join(row).rstrip() + "\n" for row in cells)


def _cut(text: str, width: int) -> str:
    """At most `width` characters of `text`."""
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _write(text: str) -> None:
    """Writes to stdout, whatever its encoding."""
    stream: TextIO = sys.stdout
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))


def _plain(data: Any) -> Any:
    """`data` as JSON: numbers that it has not are the strings `nan`, `inf` and `-inf`."""
    if isinstance(data, Mapping):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    return data


class Clock:
    """How long something takes."""

    def __init__(self) -> None:
        """Begins now."""
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """The seconds since it began."""
        return max(time.monotonic() - self._began, 1e-9)

    def speed(self, nbytes: int) -> str:
        """The speed at which `nbytes` were processed since it began."""
        return f"{size(int(nbytes / self.seconds))}/s"


# What a command is, and the arguments that several of them have.


# The exit codes: all is well; the answer is that something is not; there is no answer.
FINE, BAD, ERROR = 0, 1, 2

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kMGT]?)(i?)B?)?", re.IGNORECASE)


class CliError(Exception):
    """A command cannot do what it was asked for; the message is for people."""


def add_common(parser: argparse.ArgumentParser) -> None:
    """The arguments that every command has."""
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    store = parser.add_argument_group("object stores (s3://, gs://)")
    store.add_argument("--endpoint", metavar="URL", help="of a server that speaks S3")
    store.add_argument("--region", help="of an S3 bucket")
    store.add_argument(
        "--credentials", metavar="HOW", help="for S3: environment, anonymous or profile:NAME"
    )


def add_metric(parser: argparse.ArgumentParser) -> None:
    """The arguments that say which step is best."""
    parser.add_argument("--metric", metavar="NAME", help="which metric decides what is best")
    parser.add_argument(
        "--mode", choices=("min", "max"), default="min", help="whether small or large is good"
    )


def add_writing(parser: argparse.ArgumentParser) -> None:
    """The arguments of commands that write a checkpoint."""
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    parser.add_argument(
        "--no-atomic-rename",
        action="store_true",
        help="the directory is a bucket that is mounted: see Options(atomic_rename=False)",
    )


def options_of(args: argparse.Namespace) -> Options:
    """The options that the arguments ask for.

    Raises:
      CliError: when one of them is not as it should be.
    """
    from flaxckpt.options import ObjectStore, Options

    try:
        store = ObjectStore(args.endpoint, args.region, args.credentials)
    except ValueError as error:
        raise CliError(str(error)) from None
    return Options(storage=store, atomic_rename=not getattr(args, "no_atomic_rename", False))


def positive(text: str) -> int:
    """An argument that is an integer of at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive integer")
    return int(text)


def step_number(text: str) -> int:
    """An argument that is a step."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no step")
    return int(text)


def byte_count(text: str) -> int:
    """An argument that is a number of bytes.

    Example:
      >>> byte_count("5GB"), byte_count("1.5 MiB"), byte_count("4096")
      (5000000000, 1572864, 4096)
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size, such as 5GB")
    power = " kmgt".index((found[2] or " ").lower())
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)
