"""Calls a function in a process of its own: fresh imports, fresh memory, its own devices."""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any


def call(function: Callable[..., Any], *args: Any, devices: int = 1) -> Any:
    """What `function(*args)` returns in a new process with so many CPU devices; all of it JSON."""
    name = f"{function.__module__}:{function.__qualname__}"
    flags = f"--xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.process", name, json.dumps(args)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Prints the result of the call that the arguments name, as JSON."""
    logging.disable(logging.WARNING)  # Orbax says much on every save
    module, _, function = sys.argv[1].partition(":")
    print(json.dumps(getattr(importlib.import_module(module), function)(*json.loads(sys.argv[2]))))


if __name__ == "__main__":
    main()
