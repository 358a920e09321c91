"""Processes that a test talks to line by line."""

import contextlib
import os
import signal
import time
from pathlib import Path

from tests import processes


class Child:
    """Python code in a process of its own; lines to its stdin, lines from its stdout."""

    def __init__(self, code, *args):
        """Starts `code` with `args` in `sys.argv[1:]`; what it writes to stderr is kept."""
        self._process = processes.start(code, *args)
        self.pid = self._process.pid

    def tell(self, line):
        """Writes a line to it."""
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def hear(self):
        """The next line from it; when it has ended instead, its errors are raised."""
        line = self._process.stdout.readline()
        if not line:
            raise ChildProcessError(f"the child ended early:\n{self._process.communicate()[1]}")
        return line.rstrip("\n")

    def kill(self):
        """Kills it; the lines that were not heard yet."""
        self._process.kill()
        return self._process.communicate()[0].splitlines()

    def end(self):
        """Waits until it has ended by itself, well; the lines that were not heard yet."""
        out, err = self._process.communicate(timeout=300)
        assert self._process.returncode == 0, err
        return out.splitlines()

    def pause(self):
        """Stops it, and waits until none of its threads is in a system call."""
        os.kill(self.pid, signal.SIGSTOP)
        self.until_stopped()

    def until_stopped(self):
        """Waits until all of its threads are stopped."""
        deadline = time.monotonic() + 60
        while set(states := _thread_states(self.pid)) != {"T"}:
            assert time.monotonic() < deadline, states
            time.sleep(0.001)

    def resume(self):
        """Lets it go on."""
        os.kill(self.pid, signal.SIGCONT)


def _thread_states(pid):
    """The states of the threads of a process, as one letter each."""
    tasks = Path(f"/proc/{pid}/task")
    found = []
    for task in tasks.iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return found


@contextlib.contextmanager
def child(code, *args, ready="open"):
    """A child that has said that it is ready; killed at the end if it is there still."""
    started = Child(code, *args)
    try:
        if ready:
            assert started.hear() == ready
        yield started
    finally:
        with contextlib.suppress(ValueError):  # its pipes are closed: it has ended
            started.kill()
