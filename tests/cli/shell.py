"""Calling the command: in this process, in another one, and on a terminal."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from flaxckpt.cli.main import main
from tests.processes import ROOT, environment

SAMPLES = Path(__file__).parent.parent / "samples"


def arguments(store):
    """What says how a bucket is reached."""
    reached = store.options().storage
    if reached.endpoint is None:
        return []
    return ["--endpoint", reached.endpoint, "--region", "us-east-1", "--credentials", "environment"]


class Answer(NamedTuple):
    """What a command said."""

    status: int
    out: str
    err: str

    @property
    def json(self):
        """The document; nothing else may be there."""
        assert self.err == ""
        return json.loads(self.out)


class Shell:
    """Calls commands in this process."""

    def __init__(self, capsys, *common):
        self._capsys, self._common = capsys, common

    def __call__(self, *args):
        """What `flaxckpt args` says."""
        self._capsys.readouterr()
        status = main([*map(str, args), *self._common])
        return Answer(status, *self._capsys.readouterr())

    def json(self, *args):
        """The document, and the exit code."""
        answer = self(*args, "--json")
        return answer.json, answer.status

    def lines(self, *args):
        """The lines of a command that goes well."""
        answer = self(*args)
        assert (answer.status, answer.err) == (0, "")
        return answer.out.splitlines()

    def error(self, *args):
        """The error of a command that does not."""
        answer = self(*args)
        assert (answer.status, answer.out) == (2, "")
        assert answer.err.startswith("flaxckpt: error: ")
        assert "Traceback" not in answer.err
        return answer.err.removeprefix("flaxckpt: error: ").rstrip("\n")


def run(*args, env=()):
    """What `python -m flaxckpt args` says, in a process of its own."""
    command = [sys.executable, "-m", "flaxckpt", *map(str, args)]
    done = subprocess.run(
        command,
        env=environment() | dict(env),
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


def on_terminal(columns, *args, env=()):
    """All that `python -m flaxckpt args` writes to a terminal."""
    variables = environment() | {"COLUMNS": str(columns), "TERM": "xterm-256color"} | dict(env)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "flaxckpt", *map(str, args)]
    child = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=variables, cwd=ROOT
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            data = os.read(ours, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        written += data
    os.close(ours)
    child.wait(60)
    return written.decode().replace("\r\n", "\n")
