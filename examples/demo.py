"""Kills a training with SIGKILL, resumes it, and shows that nothing was lost: `make demo`.

Trains the CNN of `linen_digits.py` on scikit-learn's digits, which are scans of real handwriting,
in a process that is killed in mid-training. Starts it again until it is done, and trains a second
time without interruption. The final checkpoints must be equal bit for bit, and the model must
classify more than 95 % of the test images correctly.
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
    """Trains in `workdir`, kills the process once `step` is committed; returns the newest step."""
    process = start(workdir)
    try:
        with flaxckpt.CheckpointManager(workdir, read_only=True) as ckpt:
            deadline = time.monotonic() + 120
            while (ckpt.latest_step() or 0) < step:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the training did not reach step {step}")
                time.sleep(0.002)
    finally:
        process.kill()
        process.communicate()
    return ckpt.latest_step()


def main() -> int:
    """Returns the exit status: 0 if the demo succeeds."""
    run = Path("demo-run")
    shutil.rmtree(run, ignore_errors=True)

    print("1. Train, and kill -9 in mid-training:")
    killed_at = kill_after(STEPS // 4, run / "killed")
    print(f"  killed; the newest committed step is {killed_at} of {STEPS - 1}")
    print("2. Run the same command again:")
    accuracy = finish(run / "killed")
    print("3. Train without interruption in another directory:")
    finish(run / "uninterrupted")

    print("4. Compare the final checkpoints:")
    killed, uninterrupted = (
        flaxckpt.restore(run / name / str(STEPS - 1)) for name in ("killed", "uninterrupted")
    )
    found = differences(killed, uninterrupted)
    print("\n".join(f"  {line}" for line in found) or "  equal, bit for bit")
    good = 0 < killed_at < STEPS - 1 and not found and accuracy > 95
    print(f"{'PASSED' if good else 'FAILED'}: test accuracy {accuracy} % (chance: 10 %)")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
