"""Kills a training with SIGKILL, resumes it, and shows that nothing was lost: `make demo`.

Trains the CNN of `linen_digits.py` on scikit-learn's digits in a process that is killed half-way,
starts it again until it is done, and trains a second time without interruption. The final
checkpoints of the two must be equal bit for bit, and the model good on images that it never saw.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import flaxckpt
from flaxckpt.testing import differences

EXAMPLE = Path(__file__).with_name("linen_digits.py")
STEPS, SAVE_EVERY = 400, 20


def start(workdir: Path) -> subprocess.Popen:
    """Starts a training in `workdir`."""
    command = [sys.executable, EXAMPLE, "--workdir", workdir]
    command += ["--steps", str(STEPS), "--save-every", str(SAVE_EVERY)]
    return subprocess.Popen(
        command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, stdout=subprocess.PIPE, text=True
    )


def finish(workdir: Path) -> float:
    """Trains in `workdir` to the end; returns the test accuracy in percent."""
    output, _ = start(workdir).communicate(timeout=600)
    lines = output.splitlines()
    print("  " + "\n  ".join([lines[0], "...", *lines[-2:]]))
    return float(lines[-1].removeprefix("test accuracy ").removesuffix("%"))


def kill_after(step: int, workdir: Path) -> int:
    """Trains in `workdir` and kills that once `step` is committed; returns the newest step."""
    process = start(workdir)
    try:
        with flaxckpt.CheckpointManager(workdir, read_only=True) as ckpt:
            deadline = time.monotonic() + 120
            while ckpt.latest_step() is None or ckpt.latest_step() < step:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the training did not come by step {step}")
                time.sleep(0.002)
    finally:
        process.kill()
        process.communicate()
    return ckpt.latest_step()


def main() -> int:
    """Returns the exit status: 0 when all is as it should be."""
    run = Path("demo-run")
    shutil.rmtree(run, ignore_errors=True)

    print("1. Train, and kill -9 in mid-training:")
    killed_at = kill_after(STEPS // 4, run / "killed")
    print(f"  killed; the newest committed step is {killed_at} of {STEPS - 1}")
    print("2. The same command again:")
    accuracy = finish(run / "killed")
    print("3. An uninterrupted training in another directory:")
    finish(run / "uninterrupted")

    print("4. Compare the final checkpoints:")
    killed, uninterrupted = (
        flaxckpt.restore(run / name / str(STEPS - 1)) for name in ("killed", "uninterrupted")
    )
    found = differences(killed, uninterrupted)
    print("\n".join(f"  {line}" for line in found) or "  equal, bit for bit")
    good = 0 < killed_at < STEPS - 1 and not found and accuracy > 95
    print(f"{'PASSED' if good else 'FAILED'}: test accuracy {accuracy} %, of chance 10 %")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
