"""The checkpoint hook for a list of CLU periodic actions.

Importing this module imports `clu.periodic_actions` where that works, which needs TensorFlow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from flaxckpt.arguments import checked
from flaxckpt.manager import CheckpointManager
from flaxckpt.run.run import check_step
from flaxckpt.run.schedule import Every, Pacer
from flaxckpt.saving.save import SaveRequest

if TYPE_CHECKING:
    _Base: Any = object
else:
    try:
        from clu.periodic_actions import PeriodicAction as _Base
    except ImportError:

        class _Base:
            """Stands in for `PeriodicAction` without TensorFlow; the hook overrides all of it."""

            def __init__(self, **schedule: Any):
                """Takes what `PeriodicAction` takes."""
                del schedule


class PeriodicCheckpoint(_Base):
    """Saves the state of a train loop now and then, as one of its CLU hooks.

    Called like any `clu.periodic_actions.PeriodicAction`, and one itself where CLU imports. Unlike
    those it takes steps that jump or repeat, and never saves a step that exists, such as the one
    that was just restored.

    Example:
      >>> ckpt = flaxckpt.CheckpointManager(tmp_path / "run")
      >>> hook = flaxckpt.PeriodicCheckpoint(ckpt, every_steps=10, on_steps=[24])
      >>> for step in range(25):
      ...     saved = hook(step, state={"step": step})
      >>> ckpt.close()
      >>> ckpt.steps()
      [0, 10, 20, 24]
    """

    @checked(manager=CheckpointManager)
    def __init__(
        self,
        manager: CheckpointManager,
        *,
        every_steps: int | None = None,
        every_secs: float | None = None,
        on_steps: Iterable[int] | None = None,
        state_fn: Callable[[], Any] | None = None,
        items_fn: Callable[[], Mapping[str, Any]] = dict,
    ):
        """A hook that saves through `manager`, whose own `save_every` it does not use.

        Args:
          manager: of the run.
          every_steps: saves when a multiple of this lies in the steps since the last call.
          every_secs: saves when more than this many seconds have passed since the last save.
          on_steps: saves at these steps, or at the next call when one was jumped over.
          state_fn: gives the state to save, in loops whose hooks get none.
          items_fn: gives items to save beside it, by name.
        """
        steps = tuple(on_steps or ())
        super().__init__(every_steps=every_steps, every_secs=every_secs, on_steps=steps)
        self._manager, self._state_fn, self._items_fn = manager, state_fn, items_fn
        self._resumed = (0, -1)
        self._pacer = Pacer(Every(steps=every_steps, secs=every_secs, at=steps))

    @checked()
    def __call__(
        self,
        step: Any,
        t: float | None = None,
        *,
        state: Any = None,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        items: Mapping[str, Any] | None = None,
    ) -> bool:
        """Saves when `step` is due; returns whether it did.

        Args:
          step: the step; may be a `jax.Array`.
          t: the time in seconds; by default that of `time.monotonic`.
          state: what to save, unless there is a `state_fn`.
          metrics: numbers by name, as for `CheckpointManager.save`.
          metadata: JSON for people and tools, as for `CheckpointManager.save`.
          items: objects to save beside the state, by name, in addition to those of `items_fn`.

        Raises:
          TypeError: when there is neither a state nor a `state_fn`.
          BackgroundSaveError: when the save before this one failed.
        """
        step, now = check_step(step), time.monotonic() if t is None else t
        if state is None and self._state_fn is None:
            raise TypeError(
                "PeriodicCheckpoint has no state to save. Give it state_fn=, or call it as "
                "hook(step, state=state)."
            )
        if (resumed := self._manager._resumed) != self._resumed:
            self._resumed = resumed
            self._pacer.saved(resumed[1], now)

        def request_fn() -> SaveRequest:
            beside = {**self._items_fn(), **(items or {})}
            return SaveRequest(self._state(state), metrics, metadata, beside)

        saved = self._manager._visit(self._pacer, step, now, request_fn)
        if saved:
            self._pacer.saved(step, now)
        return saved

    def _state(self, state: Any) -> Any:
        """The state of this call."""
        return self._state_fn() if state is None and self._state_fn is not None else state

    def _apply(self, step: int, t: float) -> None:
        """What `PeriodicAction` would call; here the call itself does the work."""
        self(step, t)
