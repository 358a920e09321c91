"""Does what a page says, as somebody would who reads it: types its commands, runs its code.

It needs nothing but flaxckpt, so that it can be the first thing that is done with an installation
(`make release-check`): `python -m tests.docs.reader docs/tutorial.md` in an empty directory.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.docs.pages import Block, blocks_of, commands_of

NUMBER = re.compile(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?%?( (B|kB|MB|GB|s|min|h|ms)(/s)?\b)?")

# What a `flaxckpt` command prints, given its arguments.
Shell = Callable[[Sequence[str]], str]


def read(page: Path, shell: Shell) -> None:
    """Does what `page` says in the current directory.

    Raises:
      AssertionError: when a command prints something else.
      Exception: what the code raises, with the lines of the page in its traceback.
    """
    names = {"__name__": "__page__"}
    for block in blocks_of(page.read_text()):
        if block.not_run:
            continue
        if block.title:
            Path(block.title).write_text(block.code)
        elif block.language == "python":
            code = "\n" * (block.line - 1) + block.code
            exec(compile(code, page, "exec"), names)
        elif block.language == "console":
            _type(block, shell)


def _type(block: Block, shell: Shell) -> None:
    """Types the commands of a block."""
    for command, printed in commands_of(block.code):
        words = shlex.split(command, comments=True)
        found = shell(words[1:]) if words[0] == "flaxckpt" else _python(words, printed)
        fits = re.fullmatch(pattern_of(printed), shape_of(found), re.DOTALL)
        assert not printed or fits, f"$ {command}\n{found}\ninstead of\n{printed}"


def _python(words: Sequence[str], printed: str) -> str:
    """What a script prints; when `Killed` is the end of that, it is."""
    assert words[0] == "python"
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    process = subprocess.Popen(
        [sys.executable, *words[1:]],
        env=environment | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
    )
    *lines, last = printed.splitlines()
    if last != "Killed":
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        return output
    output = "".join(process.stdout.readline() for _ in lines)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    return f"{output}Killed\n"


def shape_of(printed: str) -> str:
    """What is printed, but for numbers, spaces, and the directory where all of it is."""
    printed = re.sub(r"(?<![\w.])/[\w./-]*/", "/", printed)
    return "\n".join(" ".join(NUMBER.sub("#", line).split()) for line in printed.splitlines())


def pattern_of(printed: str) -> str:
    """What the shape has to be; `...` stands for anything."""
    return ".*".join(map(re.escape, shape_of(printed).split("...")))


def at_the_shell(arguments: Sequence[str]) -> str:
    """What the command beside this Python prints."""
    command = [Path(sys.executable).with_name("flaxckpt"), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode in (0, 1), command
    return done.stdout


if __name__ == "__main__":
    began = time.monotonic()
    read(Path(sys.argv[1]), at_the_shell)
    print(f"did all that {sys.argv[1]} says in {time.monotonic() - began:.0f} s")
