"""Saving steps in the background."""

from __future__ import annotations

import atexit
import collections
import dataclasses
import functools
import logging
import math
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flaxckpt.errors import (
    BackgroundSaveError,
    CheckpointNotFoundError,
    DirectoryError,
    ManagerError,
    SaveTimeoutError,
    StepPinnedError,
)
from flaxckpt.items.item import ProcessRank
from flaxckpt.metadata.step_metadata import MAX_PAST, CheckpointMetadata, PastSave
from flaxckpt.multihost import PATIENCE, Collective, ProcessGroup
from flaxckpt.options import Options
from flaxckpt.run.costs import Accounts, Cost
from flaxckpt.run.retention import Keep
from flaxckpt.run.run import Run, history
from flaxckpt.saving.save import SaveRequest, check_vacant, plan_save
from flaxckpt.saving.save_plan import PlannedTree, SavePlan
from flaxckpt.saving.snapshot import HostShard, ShardQueue, hold, stream
from flaxckpt.saving.writing import PreparedSave, write
from flaxckpt.store import layout
from flaxckpt.store.store import Location

# One task at a time in the background, with its failure kept until somebody hears of it.


logger = logging.getLogger("flaxckpt")


class _Task:
    """Something to do, called `name` in errors, and whether it is done."""

    def __init__(self, name: str, run: Callable[[], None]):
        """Not done yet."""
        self.name, self.run = name, run
        self.done = threading.Event()


class Background:
    """Runs one task at a time in a thread of its own.

    A script that ends waits for it, however it ends: by its last line, `sys.exit` or an exception.
    """

    def __init__(self, timeout_secs: float) -> None:
        """Nothing runs; what will is waited for so long."""
        self.timeout_secs = timeout_secs
        self._tasks: queue.SimpleQueue[_Task | None] | None = None
        self._task: _Task | None = None
        self._at_exit: Callable[[], None] | None = None
        self._failure: tuple[str, BaseException] | None = None
        self.last_error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a task is running."""
        return self._task is not None and not self._task.done.is_set()

    def start(self, name: str, task: Callable[[], None]) -> None:
        """Runs `task`, called `name` in errors; the one before it has ended and was raised."""
        self._task = _Task(name, functools.partial(self._run, name, task))
        self._at_exit = functools.partial(_finish, self._task, self.timeout_secs)
        atexit.register(self._at_exit)
        self._queue().put(self._task)

    def _queue(self) -> queue.SimpleQueue[_Task | None]:
        """What the thread takes its tasks from; the thread ends when this object is gone.

        It is one thread for all tasks: the C library gives each new one a heap of its own, and
        the chunks of every save would lie in another.
        """
        if self._tasks is None:
            self._tasks = queue.SimpleQueue()
            weakref.finalize(self, self._tasks.put, None)
            # A daemon, because Python would wait for any other thread without a bound; and no
            # pool of Python's, because those take no work once the interpreter is ending.
            serve = functools.partial(_serve, self._tasks)
            threading.Thread(target=serve, name="flaxckpt-save", daemon=True).start()
        return self._tasks

    def _run(self, name: str, task: Callable[[], None]) -> None:
        """Runs `task` and keeps what it raises; nobody is there to catch it."""
        try:
            task()
        except BaseException as error:  # noqa: BLE001 - raised again by `raise_failure`
            # The frames hold the snapshot: every byte of the state, and the disk may be full.
            del task
            _forget_frames(error)
            self.last_error, self._failure = error, (name, error)
            logger.error("%s failed: %s: %s", name, type(error).__name__, error)

    def join(self) -> None:
        """Waits for the running task.

        Raises:
          SaveTimeoutError: when it takes too long.
        """
        if self._task is None:
            return
        if not self._task.done.wait(min(self.timeout_secs, threading.TIMEOUT_MAX)):
            raise SaveTimeoutError(
                f"{self._task.name} did not finish within {self.timeout_secs:g} s and is still "
                "running. Wait again, or raise Options(timeout_secs=...)."
            )
        self._task = None
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)

    def raise_failure(self) -> None:
        """Raises the failure of the last task, once.

        Raises:
          BackgroundSaveError: from the original exception.
        """
        if self._failure is None:
            return
        (name, error), self._failure = self._failure, None
        raise BackgroundSaveError(
            f"{name} failed in the background: {type(error).__name__}: {str(error).rstrip('.')}. "
            "Earlier steps are intact. Fix the cause and save again."
        ) from error


def _forget_frames(error: BaseException | None) -> None:
    """Drops what the frames of `error`, and of those it came from, hold; it prints as before."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _serve(tasks: queue.SimpleQueue[_Task | None]) -> None:
    """Runs one task after the other until there is a `None`; keeps nothing of what is done."""
    while (task := tasks.get()) is not None:
        run, done = task.run, task.done
        del task.run, task
        run()
        del run
        done.set()
        del done


def _finish(task: _Task, timeout_secs: float) -> None:
    """Waits for `task` while the interpreter ends, and says so."""
    if task.done.is_set():
        return
    logger.warning(
        "%s: the script is exiting, waiting up to %g s for it to finish", task.name, timeout_secs
    )
    if not task.done.wait(min(timeout_secs, threading.TIMEOUT_MAX)):
        logger.error("%s did not finish within %g s and is given up", task.name, timeout_secs)


# Writing the steps of a run: snapshot on the caller's thread, the rest in the background.


@dataclasses.dataclass
class _StepSave:
    """One step that is being saved.

    Attributes:
      step: its number.
      prepared: what is written, and where.
      collective: the operation of the processes that write it.
      began: when the loop called, in seconds.
      blocked: for how many seconds the loop waited, if not for all.
    """

    step: int
    prepared: PreparedSave
    collective: Collective
    began: float
    blocked: float | None = None


class Writer:
    """Writes one step at a time, and deletes steps after each commit."""

    def __init__(
        self,
        run: Run,
        keep: Keep,
        options: Options,
        accounts: Accounts | None = None,
        on_commit: Callable[[int], None] | None = None,
        *,
        async_: bool,
    ):
        """A writer for `run`, which tells `accounts` and `on_commit` of what it does."""
        self.background = Background(options.timeout_secs)
        self._run, self._keep, self._options = run, keep, options
        self._async, self._accounts, self._on_commit = async_, accounts, on_commit
        self._plans: dict[str, SavePlan] = {}
        self._is_prepared = False
        self._past: collections.deque[PastSave] | None = None
        # Steps that a rollback has set aside, by this writer or by one before it.
        self.may_have_aside = True

    def save(
        self,
        step: int,
        request: SaveRequest,
        group: ProcessGroup,
        *,
        attempt: str | None = None,
        rank: ProcessRank | None = None,
    ) -> None:
        """Saves `step`, with all of `group`; returns when the state and the items may change.

        The save before this one is waited for, and its failure is raised. The `attempt` is the id
        of the save, if it has one already; `rank` is that of this process, if not in `group`.
        """
        began, request = time.monotonic(), request.checked()
        ranking = self._keep.ranking_of(request.metrics or {})
        self.wait()
        patience = 1.0 if group.process is None else PATIENCE
        self.background.timeout_secs = patience * self._options.timeout_secs
        path = self._run.path(step)
        collective = group.collective(f"saving step {step} of {self._run.directory}")
        with collective.sharing_errors():
            admitted = collective.broadcast(functools.partial(self._admit, step, request.overwrite))
            known: dict[str, Any] = {"ranking": ranking, "rank": rank, "plans": self._plans}
            prepared, trees = plan_save(
                request, path, group, self._options, attempt or admitted, **known
            )
            self._plans = {tree.directory: tree.plan for tree in prepared.trees}
            self._start(_StepSave(step, prepared, collective, began), trees)

    def _admit(self, step: int, overwrite: bool) -> str:
        """The id of an attempt to save `step`, once that is known to be possible."""
        directory = self._run.directory
        if not directory.store.can.locks and not self._is_prepared:
            # Not when the run was opened: another writer's claims look like those of one that is
            # gone, and whoever only pins a step must not take them over.
            directory.store.prepare(directory)
            log_removed(directory.store.take_over(directory))
            self._is_prepared = True
        check_vacant(self._run.path(step), overwrite=overwrite)
        self._run.check_not_pinned(step)
        store = self._run.directory.store
        if self.may_have_aside and not store.can.atomic_rename:  # it is in the way
            store.remove_aside(self._run.directory, layout.step_name(step))
        return layout.new_attempt()

    def wait(self) -> None:
        """Waits for the save in flight and raises its failure."""
        self.background.join()
        self.background.raise_failure()

    def _start(self, save: _StepSave, trees: Sequence[PlannedTree]) -> None:
        """Writes `trees`, or sees to it that they are written whatever becomes of them."""
        title = f"saving step {save.step} to {self._run.directory}"
        if not self._async:
            self._write(save, stream(*trees, limit=self._options.snapshot_bytes, copy=False))
        elif (limit := self._options.snapshot_bytes) is None or save.prepared.held_bytes <= limit:
            shards = hold(*trees)
            save.blocked = time.monotonic() - save.began
            self.background.start(title, functools.partial(self._write, save, shards))
        else:
            waiting = ShardQueue(limit // 2)
            self.background.start(title, functools.partial(self._write, save, waiting))
            went_on = waiting.put_all(stream(*trees, limit=limit // 2, copy=True))
            save.blocked = time.monotonic() - save.began
            waiting.end()
            if not went_on:
                self.wait()

    def _write(self, save: _StepSave, shards: Iterable[HostShard]) -> None:
        """Writes and commits one step, then deletes the steps that are no longer kept."""
        prepared, is_process_0 = save.prepared, save.collective.group.is_process_0
        try:
            if is_process_0:  # in the background: it may read the metadata of the previous step
                with save.collective.sharing_errors():
                    described, past = self._ranked(prepared.described), self._remembered()
                    prepared = dataclasses.replace(prepared, past=past, described=described)
            write(prepared, shards, save.collective)
        finally:
            if isinstance(shards, ShardQueue):  # the loop's thread may be waiting to put more
                shards.stop()
        self._run.forget(save.step)
        plan, seconds = prepared.state.plan, time.monotonic() - save.began
        blocked = seconds if save.blocked is None else save.blocked
        cost = Cost(save.step, len(plan.records), plan.nbytes, seconds, blocked)
        logger.info("saved step %d: %s, to %s", save.step, cost, prepared.final)
        self._remember(cost, prepared.described.metrics)
        if is_process_0:
            try:
                self._call_on_commit(save.step)
            finally:
                self._delete_unkept(save.step)
                if self.may_have_aside:
                    self._run.directory.store.remove_aside(self._run.directory)
                    self.may_have_aside = False

    def _call_on_commit(self, step: int) -> None:
        if self._on_commit is None:
            return
        try:
            self._on_commit(step)
        except Exception as error:
            raise ManagerError(
                f"step {step} is saved, but on_commit raised {type(error).__name__}: {error}. Fix "
                "the function that is passed as CheckpointManager(on_commit=...)."
            ) from error

    def _remember(self, cost: Cost, metrics: Mapping[str, float]) -> None:
        """Remembers a save, for the next ones to tell of it."""
        past = [] if self._past is None else self._past  # only process 0 remembers
        known = {name: value for name, value in metrics.items() if math.isfinite(value)}
        times = (time.time(), cost.seconds, cost.blocked_seconds)
        past.append(PastSave(cost.step, *times, cost.leaves, cost.nbytes, known))
        if self._accounts is not None:
            self._accounts.saved(cost)

    def _remembered(self) -> tuple[PastSave, ...]:
        """The saves of the run so far; what its newest step knows, when this is the first."""
        if self._past is None:
            self._past = collections.deque(history(self._run, self._options), maxlen=MAX_PAST)
        return tuple(self._past)

    def _ranked(self, described: CheckpointMetadata) -> CheckpointMetadata:
        """With the ranking that the run had, unless this manager has one."""
        if described.ranking is not None or self._keep.mode is not None:
            return described
        return dataclasses.replace(described, ranking=self._run.ranking())

    def _delete_unkept(self, saved: int) -> None:
        """Deletes the steps that are not to be kept. Only called after the commit of `saved`.

        That step stays, even when it is not the newest: a loop that went back to an older step
        must find what it saved since.
        """
        if self._keep.everything:
            return
        infos = self._run.infos(self._keep.metric)
        kept = self._keep.select(infos) | {saved}
        for step in sorted({info.step for info in infos} - kept):
            try:
                self._run.delete(step)
            except (StepPinnedError, CheckpointNotFoundError):
                continue  # only now is it looked up whether a step is pinned, or gone
            except OSError as error:
                raise DirectoryError(
                    f"step {saved} is saved, but the expired step {step} cannot be deleted: "
                    f"{error}. Fix the cause; the next save retries."
                ) from error
            logger.debug("deleted step %d of %s", step, self._run.directory)


def log_removed(paths: Iterable[Location]) -> None:
    """Says what writers that are gone had left."""
    for path in paths:
        logger.info("removed %s, left by a save that never ended", path)
