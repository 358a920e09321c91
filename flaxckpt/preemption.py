"""Saving before the machine is taken away.

The library never installs a signal handler by itself: jax's preemption service has one, which a
later one would silently disable, and the handlers of a script are its own.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Protocol

import jax

from flaxckpt.errors import ManagerError


class CanEnd(Protocol):
    """What can be told that the end is near: a `CheckpointManager`."""

    def ask_to_end(self) -> None:
        """Makes the next call save."""


@contextlib.contextmanager
def on_preemption(
    manager: CanEnd, signals: Iterable[signal.Signals] = (signal.SIGTERM,)
) -> Iterator[None]:
    """Lets a signal during the block make `manager` save when it is called next.

    For a single process without `jax.distributed`, whose own service needs no such thing. The
    manager sets `preempted` when it has saved, and the loop is to end then.

    Args:
      manager: called in the loop.
      signals: that announce the end; their handlers are put back after the block.

    Raises:
      ManagerError: where `jax.distributed` is initialised: a handler would disable jax's.
      ValueError: outside of the main thread, where Python allows no handlers.

    Example:
      >>> ckpt = flaxckpt.CheckpointManager(tmp_path / "run", save_every=flaxckpt.Every(steps=100))
      >>> with flaxckpt.on_preemption(ckpt):
      ...     for step in range(1, 1000):
      ...         saved = ckpt(step, {"step": step})
      ...         if ckpt.preempted:
      ...             break
      ...         if step == 7:
      ...             signal.raise_signal(signal.SIGTERM)
      >>> ckpt.close()
      >>> ckpt.steps()
      [8]
    """
    if jax.distributed.is_initialized():
        raise ManagerError(
            "jax.distributed is initialised, and jax handles SIGTERM: the manager learns of it "
            "without on_preemption, which would disable that. Leave it out."
        )

    def ask(number: int, frame: FrameType | None) -> None:
        del number, frame
        manager.ask_to_end()

    before = {number: signal.signal(number, ask) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
