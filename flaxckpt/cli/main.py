"""The parser of `flaxckpt`, and what becomes of errors."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import flaxckpt
from flaxckpt.cli.command import ERROR, CliError, Output, add_common
from flaxckpt.errors import FlaxckptError

# What can be typed: the module of a command has its name. Another command is one more module here,
# and one more line. Only the module of the command that was typed is imported, because a command
# starts within half a second, and jax alone takes one.
COMMANDS = {
    "ls": "lists the steps of a run",
    "show": "shows the tree of a checkpoint of any format",
    "diff": "says how two checkpoints differ",
    "verify": "reads every byte of checkpoints and checks every checksum",
    "cp": "copies a checkpoint or a run, between disks and buckets",
    "convert": "rewrites a checkpoint of any format as flaxckpt's",
    "export": "writes the arrays of a checkpoint to safetensors",
    "rm": "deletes steps of a run; only says which without --yes",
    "pin": "pins a step, so that it is never deleted",
    "report": "writes a page about a run",
}

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


def parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands, with the arguments of the `chosen` one."""
    main = _Parser("flaxckpt", description="Looks into checkpoints and runs.", epilog=_EPILOG)
    main.add_argument("--version", action="version", version=f"flaxckpt {flaxckpt.__version__}")
    commands = main.add_subparsers(metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary)
        if name == chosen:
            module = importlib.import_module(f"flaxckpt.cli.{name}")
            module.add_arguments(sub)
            add_common(sub)
            sub.set_defaults(command=module)
    return main


def main(argv: Sequence[str] | None = None) -> int:
    """Does what `argv` (by default that of the process) says; returns the exit code."""
    typed = sys.argv[1:] if argv is None else argv
    try:
        args = parser(typed[0] if typed else None).parse_args(typed)
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
