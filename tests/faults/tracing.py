"""`strace`, attached to some threads of a process: what they called, and one call made to fail.

strace counts the calls for `when=N` by thread and by name. So it is attached either to the main
thread or to all the others, never to both, and a call is addressed by its side, name and number.
On the other side that number is right when one thread makes all calls, as is mostly the case.
"""

import collections
import dataclasses
import os
import re
import subprocess

# Every call that can change a file system, in the kinds that are swept one by one. `?`: not every
# machine has each of them.
KINDS = {
    "mkdir": "mkdir mkdirat",
    "open": "openat open creat openat2",  # those for writing
    "write": "write writev pwrite64 pwritev pwritev2 ftruncate fallocate sendfile copy_file_range",
    "fsync": "fsync fdatasync sync_file_range syncfs",
    "rename": "rename renameat renameat2 link linkat symlink symlinkat",
    "unlink": "unlink unlinkat rmdir",
}
_KIND_OF = {name: kind for kind, names in KINDS.items() for name in names.split()}
_ALL = ",".join(f"?{name}" for name in _KIND_OF)

_LINE = re.compile(r"(?:(\d+) +)?(?:<\.\.\. \w+ resumed>|(\w+)\()(.*)")
_AT_FD = re.compile(r'(?:\d+|AT_FDCWD)<([^>]*)>(?:\(deleted\))?(?:, "([^"]*)")?')
_NAME = re.compile(r'"([^"]*)"')
_RESULT = re.compile(r"\) += (-?\w+|\?)(?: (E[A-Z]+))?[^\"]*$")
_RANDOM = re.compile(r"-[0-9a-f]{12}|[0-9a-f]{32}")


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of one save.

    Attributes:
      main: whether the main thread made it.
      name: of the system call.
      number: among the calls of that name on that side, from 1.
      path: relative to the run, without what is random in it.
      occurrence: among the calls of that name with that path on that side.
      writes: whether it can change something.
      error: `EEXIST`, ...; empty when it went well.
      hit: whether it was this one that was killed or made to fail.
    """

    main: bool
    name: str
    number: int
    path: str
    occurrence: int
    writes: bool
    error: str
    hit: bool

    @property
    def kind(self):
        """The kind that it is swept with."""
        return _KIND_OF[self.name]

    @property
    def identity(self):
        """What is the same in each save."""
        return self.main, self.name, self.path, self.occurrence


class Tracer:
    """strace at work on some threads of a process, or without a fault on all, also new ones."""

    def __init__(self, threads, log, inject=()):
        """Returns when it is attached.

        Raises:
          PermissionError: when it may not be.
        """
        self._log, self._threads = log, threads
        command = ["strace", "-y", "-s", "0", "-e", "signal=none", "-e", f"trace={_ALL}"]
        command += [*inject, "-o", str(log)]
        attached = threads if inject else threads[:1]
        command += [] if inject else ["-f"]
        for thread in attached:
            command += ["-p", str(thread)]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        for _ in attached:
            line = self._process.stderr.readline()
            if "attached" not in line:
                self.stop()
                raise PermissionError(f"strace cannot attach: {line.strip()}")

    def stop(self):
        """Detaches."""
        self._process.terminate()
        self._process.stderr.read()
        self._process.stderr.close()
        self._process.wait()

    def calls(self, directory, main):
        """The calls on files of the run in `directory`, in order; `main` is the main thread."""
        return parse(self._log.read_text(), str(directory), main, self._threads[0])


def injection(call, fault):
    """The arguments for strace that put `fault` into `call`."""
    return ["-e", f"inject={call.name}:{fault}:when={call.number}"]


def parse(text, directory, main, only):
    """The calls on files below `directory` in a log of strace; of the thread `only` if of one."""
    entries, pending = [], {}
    for found in filter(None, map(_LINE.match, text.splitlines())):
        thread, name, rest = int(found[1] or only), found[2], found[3]
        if name is None:
            pending.pop(thread)[2] += rest
            continue
        entries.append([thread, name, rest.removesuffix(" <unfinished ...>")])
        pending[thread] = entries[-1]
    numbers, occurrences, calls = collections.Counter(), collections.Counter(), []
    for thread, name, rest in entries:
        numbers[thread == main, name] += 1
        path = _path(rest)
        if not path.startswith(directory):
            continue
        path = _RANDOM.sub("*", path.removeprefix(directory).removeprefix("/")) or "."
        occurrences[thread == main, name, path] += 1
        result = _RESULT.search(rest)
        lost = result is None or result[1] == "?"
        calls.append(
            Call(
                main=thread == main,
                name=name,
                number=numbers[thread == main, name],
                path=path,
                occurrence=occurrences[thread == main, name, path],
                writes="open" not in name or re.search("O_WRONLY|O_RDWR|O_CREAT", rest) is not None,
                error="" if lost else result[2] or "",
                hit=lost or "(INJECTED)" in rest,
            )
        )
    return calls


def _path(arguments):
    """The file that a call is about."""
    if at := _AT_FD.match(arguments):
        directory, name = at.groups()
        return os.path.join(directory, name) if name else directory  # data are shown as ""
    return name[1] if (name := _NAME.match(arguments)) else ""
