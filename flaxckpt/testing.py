"""For users' own tests: that a resumed run is the uninterrupted one, bit for bit."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from flaxckpt.errors import ResumeMismatchError
from flaxckpt.leaves import kinds
from flaxckpt.tree import nnx_objects
from flaxckpt.tree.structure import flatten

Loop = Callable[[int], Any]


def assert_bitwise_resume(make_loop: Callable[[str], Loop], steps: int, stop_at: int) -> None:
    """Asserts that stopping and resuming changes no bit of where a train loop ends.

    Args:
      make_loop: given a run directory, makes everything anew (model, data, manager) and returns
        the loop: called with a number of steps, it resumes from the directory if it can, trains
        until that many steps are done in all, and returns what must be equal: the state, and the
        position in the data when that is kept elsewhere.
      steps: how many steps the uninterrupted run makes.
      stop_at: after how many the other one stops.

    Raises:
      ResumeMismatchError: with every leaf that differs.
      ValueError: when `stop_at` does not lie within the run.

    Example:
      >>> def make_loop(directory):
      ...     def loop(steps):
      ...         with flaxckpt.CheckpointManager(directory) as ckpt:
      ...             state = ckpt.restore_or_init(lambda: {"w": jax.numpy.zeros(3)})
      ...             for step in range(ckpt.next_step, steps):
      ...                 state = {"w": state["w"] * 0.9 + step}
      ...                 ckpt(step, state)
      ...         return state
      ...     return loop
      >>> assert_bitwise_resume(make_loop, steps=4, stop_at=2)
    """
    if not 0 < stop_at < steps:
        raise ValueError(f"stop_at must lie between 0 and {steps}, got {stop_at}")
    with tempfile.TemporaryDirectory() as directory:
        at_once = make_loop(os.path.join(directory, "at_once"))(steps)
        resumed_in = os.path.join(directory, "resumed")
        make_loop(resumed_in)(stop_at)
        resumed = make_loop(resumed_in)(steps)
    if found := differences(at_once, resumed):
        rows = "\n".join(f"  {line}" for line in found)
        raise ResumeMismatchError(
            f"stopped after {stop_at} of {steps} steps and resumed, these leaves differ "
            f"({len(found)}):\n{rows}\nWhat differs is not part of what is saved, or not restored "
            "before use. Save it with the state, or as an item."
        )


def differences(a: Any, b: Any) -> list[str]:
    """Every leaf in which two trees differ: in being there, type, dtype, shape, or a single bit.

    Example:
      >>> differences({"x": 1, "y": 2}, {"x": 1, "y": 3})
      ['y: 2 and 3']
    """
    left, right = _by_name(a), _by_name(b)
    lines = []
    for name in dict.fromkeys([*left, *right]):
        if name not in left or name not in right:
            lines.append(f"{name}: only in the {'first' if name in left else 'second'} tree")
        elif difference := _difference(left[name], right[name]):
            lines.append(f"{name}: {difference}")
    return lines


def _by_name(tree: Any) -> dict[str, Any]:
    """The leaves of `tree` by name."""
    flat = flatten(nnx_objects.split(tree)[0])
    return dict(zip(flat.names, flat.leaves, strict=True))


def _difference(a: Any, b: Any) -> str:
    """How two leaves differ; `""` when they do not."""
    (spec_a, data_a), (spec_b, data_b) = kinds.encode(a, "a"), kinds.encode(b, "b")
    if spec_a != spec_b:
        return f"{spec_a} and {spec_b}"
    if not isinstance(data_a, jax.Array | np.ndarray):
        return "" if data_a == data_b else f"{a!r} and {b!r}"
    if (bytes_a := np.asarray(data_a).tobytes()) == (bytes_b := np.asarray(data_b).tobytes()):
        return ""
    if spec_a.kind not in ("jax", "numpy"):
        return f"{a!r} and {b!r}"
    differing = np.frombuffer(bytes_a, np.uint8) != np.frombuffer(bytes_b, np.uint8)
    return f"{int(differing.sum())} of {differing.size} bytes differ"
