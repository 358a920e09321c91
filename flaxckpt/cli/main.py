"""The parser of `flaxckpt`, and its errors."""

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

# The commands. The module of a command has its name, `add_arguments(parser)` and `run(args, out)`.
# Only the module of the command that was typed is imported, because a command starts within half a
# second, and jax alone takes one second.
COMMANDS = {
    "ls": "list the steps of a run",
    "show": "show the tree of a checkpoint of any format",
    "diff": "compare two checkpoints",
    "verify": "read every byte of checkpoints and check every checksum",
    "cp": "copy a checkpoint or a run, between disks and buckets",
    "convert": "rewrite a checkpoint of any format in the format of flaxckpt",
    "export": "write the arrays of a checkpoint to safetensors",
    "rm": "delete steps of a run (a dry run without --yes)",
    "pin": "pin a step, so that it is never deleted",
    "report": "write an HTML page about a run",
}

# The exit codes that a shell gives a process ended by SIGINT or SIGPIPE.
INTERRUPTED, BROKEN_PIPE = 130, 141

_EPILOG = (
    "exit codes: 0 success; 1 damage or differences were found; 2 an error. "
    "FLAXCKPT_TRACEBACK=1 shows where an error comes from."
)
# The advice of the library, with the options of the command line.
_WORDS = {
    "overwrite=True": "--overwrite",
    "rename=": "--rename ",
    "max_shard_bytes": "--max-shard-bytes",
}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Exits with one line."""
        self.exit(ERROR, f"flaxckpt: error: {message}. See {self.prog} --help.\n")


def parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands, with the arguments of the `chosen` one."""
    main = _Parser(
        "flaxckpt", description="Inspect and manage checkpoints and runs.", epilog=_EPILOG
    )
    main.add_argument("--version", action="version", version=f"flaxckpt {flaxckpt.__version__}")
    commands = main.add_subparsers(metavar="COMMAND", required=True)
    for name, what in COMMANDS.items():
        sub = commands.add_parser(name, help=what, description=what)
        if name == chosen:
            module = importlib.import_module(f"flaxckpt.cli.{name}")
            module.add_arguments(sub)
            add_common(sub)
            sub.set_defaults(command=module)
    return main


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command in `argv`, by default `sys.argv`; returns the exit code."""
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
    """The entry point."""
    # The command must not take the accelerator from the job that writes the checkpoint.
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.exit(main())


def _explain(error: Exception) -> None:
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
    sys.stderr.write(f"flaxckpt: {text}\n")


def _close_stdout() -> None:
    """Keeps Python from complaining on exit that stdout is closed."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
