"""The parser of `flaxckpt`, and what becomes of errors."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

# A command starts within half a second, and jax alone takes one. So the modules of commands import
# what they work with inside of their functions. (Those in `cli.work`, which only such functions
# import, do it at their top.)
import flaxckpt
from flaxckpt.cli import convert, copy, diff, export, ls, pin, report, rm, show, verify
from flaxckpt.cli.command import ERROR, CliError, Command, add_common
from flaxckpt.cli.output import Output
from flaxckpt.errors import FlaxckptError

# What can be typed. Another command is one more module, and one more name here.
COMMANDS: tuple[Command, ...] = (
    ls.COMMAND,
    show.COMMAND,
    diff.COMMAND,
    verify.COMMAND,
    copy.COMMAND,
    convert.COMMAND,
    export.COMMAND,
    rm.COMMAND,
    pin.COMMAND,
    report.COMMAND,
)

# As the shell says it of a process that a signal ended: SIGINT, SIGPIPE.
INTERRUPTED, BROKEN_PIPE = 130, 141

_EPILOG = (
    "exit codes: 0 all is well; 1 the answer is bad (damage, differences); 2 an error. "
    "FLAXCKPT_TRACEBACK=1 shows where an error comes from."
)
# The library's advice, in the words of the command.
_WORDS = {
    "overwrite=True": "--overwrite",
    "rename=": "--rename ",
    "max_shard_bytes": "--max-shard-bytes",
}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Says what is wrong with the arguments."""
        self.exit(ERROR, f"flaxckpt: error: {message}. See {self.prog} --help.\n")


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    main = _Parser("flaxckpt", description="Looks into checkpoints and runs.", epilog=_EPILOG)
    main.add_argument("--version", action="version", version=f"flaxckpt {flaxckpt.__version__}")
    commands = main.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        sub = commands.add_parser(command.name, help=command.summary, description=command.summary)
        command.add_arguments(sub)
        add_common(sub)
        sub.set_defaults(command=command)
    return main


def main(argv: Sequence[str] | None = None) -> int:
    """Does what `argv` (by default that of the process) says; returns the exit code."""
    try:
        args = parser().parse_args(argv)
    except SystemExit as done:  # of --help, or of wrong arguments, which were explained
        return int(done.code or 0)
    try:
        status: int = args.command.run(args, Output(is_json=args.json))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        _close_stdout()
        return BROKEN_PIPE
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - nobody at a shell wants a traceback
        _explain(error)
        return ERROR


def command() -> NoReturn:
    """The command itself."""
    # Whoever looks into a checkpoint must not take the accelerator from the job that writes it.
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.exit(main())


def _explain(error: Exception) -> None:
    """Says what went wrong."""
    if os.environ.get("FLAXCKPT_TRACEBACK"):
        traceback.print_exception(error)
    elif isinstance(error, FlaxckptError | OSError | CliError):
        text = str(error)
        for word, ours in _WORDS.items():
            text = text.replace(word, ours)
        _complain(f"error: {text}")
    else:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        _complain(f"error: {what} (unexpected; FLAXCKPT_TRACEBACK=1 shows where)")


def _complain(text: str) -> None:
    """Writes to stderr."""
    sys.stderr.write(f"flaxckpt: {text}\n")


def _close_stdout() -> None:
    """Keeps Python from complaining at its end that nobody reads what is left to write."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
