"""What a command is, and the arguments that several of them have."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from flaxckpt.cli.output import Output

if TYPE_CHECKING:
    from flaxckpt.options import Options

# The exit codes: all is well; the answer is that something is not; there is no answer.
FINE, BAD, ERROR = 0, 1, 2

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kMGT]?)(i?)B?)?", re.IGNORECASE)


class CliError(Exception):
    """A command cannot do what it was asked for; the message is for people."""


class Command(NamedTuple):
    """One command.

    Attributes:
      name: what is typed.
      summary: one line for the list of commands.
      add_arguments: gives its parser its arguments.
      run: does it; returns the exit code.
    """

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Output], int]


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
    from flaxckpt.options import Options
    from flaxckpt.storage.object_store import ObjectStore

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
