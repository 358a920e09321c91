"""Python code in processes of its own, forked from a server that has imported what they need.

    process = processes.start("import sys, flaxckpt; ...", path, devices=8)

is as `subprocess.Popen([sys.executable, "-c", code, path], ...)`, without the two seconds in which
an interpreter imports jax: `code` is the `__main__` of a process with its own `sys.argv`, standard
streams, environment and working directory, and ends as any script does.

The server runs as long as the process that asked for it, and says how its children end.
"""

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent

# What tests compile, they run a few times at most.
QUICKLY_COMPILED = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# The most that a task may have: its code, its arguments and its environment.
MESSAGE_BYTES = 1 << 17
# `-c` and not `-m`: an interrupt that nobody catches ends the process by a signal, as in a script.
SERVE = "import sys; from tests import processes; exec(processes.serve(int(sys.argv[1])))"


def environment(devices: int = 1) -> dict[str, str]:
    """The environment of a child with so many host devices, that imports flaxckpt from here."""
    flags = f"--xla_force_host_platform_device_count={devices} {QUICKLY_COMPILED}"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": path}


def start(code: str, *args: object, devices: int = 1) -> subprocess.Popen[str]:
    """Starts `code` with `args` in `sys.argv[1:]`, and pipes for its standard streams."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [textwrap.dedent(code), *map(str, args)]
    return Process(command, env=environment(devices), text=True, **pipes)


def run(code: str, *args: object, devices: int = 1, timeout: float = 120) -> tuple[int, str, str]:
    """Runs `code`; its exit code, output and errors."""
    process = start(code, *args, devices=devices)
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def run_fresh(code: str, *args: object, devices: int = 1) -> tuple[int, str, str]:
    """As `run`, in an interpreter that has imported nothing, for tests of imports and memory."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    done = subprocess.run(command, env=environment(devices), capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


class _Server:
    """The server, as the process sees it that has started it."""

    def __init__(self):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._socket, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
        self._statuses, self._lock = {}, threading.RLock()
        command = [sys.executable, "-c", SERVE, str(theirs.fileno())]
        fds = [theirs.fileno()]
        self._process = subprocess.Popen(command, env=environment(), pass_fds=fds)
        theirs.close()
        atexit.register(self._close)

    def _close(self):
        """Ends the server, which also ends when this process is killed."""
        self._socket.close()
        self._process.wait()

    def fork(self, task, fds):
        """The id of a new process for `task`, with `fds` as its standard streams."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(task).encode()], fds)
            while "pid" not in (told := self._hear(None)):
                pass
            return told["pid"]

    def status(self, pid, timeout):
        """How the process ended, in the words of `waitpid`; `None` if it has not."""
        end = time.monotonic() + timeout
        with self._lock:
            while pid not in self._statuses and self._hear(max(0.0, end - time.monotonic())):
                pass
            return self._statuses.get(pid)

    def _hear(self, timeout):
        """The next message; an empty one if there is none in time."""
        if not select.select([self._socket], [], [], timeout)[0]:
            return {}
        told = json.loads(self._socket.recv(MESSAGE_BYTES))
        if "ended" in told:
            self._statuses[told["ended"]] = told["status"]
        return told


@functools.cache
def _server(pid):
    """The server of this process, whose id is `pid`: a fork of it needs another one."""
    del pid
    return _Server()


class Process(subprocess.Popen):
    """A `subprocess.Popen` whose process the server forks; `args` are its code and `sys.argv`."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        # *rest: startupinfo, creationflags, shell, then the pipes.
        read_in, write_in, read_out, write_out, read_err, write_err = rest[3:9]
        code, *argv = args
        task = {"code": code, "argv": argv, "env": env, "cwd": str(cwd or os.getcwd())}
        self._fork_server = _server(os.getpid())
        with open(os.devnull, "r+b") as null:
            fds = [null.fileno() if fd == -1 else fd for fd in (read_in, write_out, write_err)]
            self.pid = self._fork_server.fork(task, fds)
        self._child_created = True
        self._close_pipe_fds(read_in, write_in, read_out, write_out, read_err, write_err)

    def _internal_poll(self, _deadstate=None, **_):
        return self._ended(0.0)

    def _wait(self, timeout):
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self._ended(0.2 if end is None else end - time.monotonic())) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def _ended(self, timeout):
        """The exit code, or `None`."""
        if self.returncode is None:
            status = self._fork_server.status(self.pid, max(0.0, timeout))
            if status is not None:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def serve(number):
    """Forks a process for each task, until nobody is left who could send one.

    Returns only in a process that it has forked: the code that this is to run.
    """
    import tests.warm  # noqa: F401 - for all of them

    server = socket.socket(fileno=number)
    awake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        ready = select.select([server, awake], [], [])[0]
        if awake in ready:
            os.read(awake, 1024)
            _report_ended(server)
        if server in ready:
            message, fds, _, _ = socket.recv_fds(server, MESSAGE_BYTES, 3)
            if not message:
                os._exit(0)
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                for fd in (awake, wake):
                    os.close(fd)
                server.close()
                return _become(json.loads(message), fds)
            for fd in fds:
                os.close(fd)
            server.send(json.dumps({"pid": pid}).encode())


def _report_ended(server):
    """Tells how the children ended that have ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        server.send(json.dumps({"ended": pid, "status": status}).encode())


def _become(task, fds):
    """Makes this process the one that is asked for; the code that it is to run."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(task["env"])
    os.chdir(task["cwd"])
    sys.argv = ["-c", *task["argv"]]
    return compile(task["code"], "<string>", "exec")
