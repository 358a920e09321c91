"""The machine and the versions that the numbers belong to."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("flaxckpt", "jax", "flax", "tensorstore", "orbax-checkpoint", "numpy")


def processor() -> str:
    """The model of the CPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def filesystem() -> str:
    """The type of the file system that everything is saved to: that of TMPDIR, or of /tmp."""
    command = ["/usr/bin/stat", "-f", "-c", "%T", tempfile.gettempdir()]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()


def describe() -> dict[str, str]:
    """Everything, by name."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores of {processor()}, {memory:.0f} GiB, "
        f"Linux {platform.release()}, {filesystem()} in {tempfile.gettempdir()}",
        "versions": ", ".join(
            [f"Python {platform.python_version()}", *(f"{p} {version(p)}" for p in PACKAGES)]
        ),
    }
