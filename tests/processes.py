"""Running Python code in a process of its own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent


def environment(devices: int = 1) -> dict[str, str]:
    """The environment of a child with so many host devices, that imports flaxckpt from here."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": path}


def start(code: str, *args: object, devices: int = 1) -> subprocess.Popen[str]:
    """Starts `code` with `args` in `sys.argv[1:]`."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment(devices), stdout=pipe, stderr=pipe, text=True)


def run(code: str, *args: object, devices: int = 1, timeout: float = 120) -> tuple[int, str, str]:
    """Runs `code`; its exit code, output and errors."""
    process = start(code, *args, devices=devices)
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err
