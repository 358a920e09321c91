"""A run of checkpoints: the one object of a train loop."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeVar, Unpack, overload

from etils import epath
from jax.sharding import Mesh

from flaxckpt import multihost
from flaxckpt.arguments import checked, no_attribute
from flaxckpt.errors import BackgroundSaveError, InvalidMetricError, ManagerError
from flaxckpt.formats.opening import open_source
from flaxckpt.inspecting import CheckpointInfo, inspect
from flaxckpt.multihost import ProcessGroup
from flaxckpt.options import Options
from flaxckpt.restoring.restore import restore_tree
from flaxckpt.restoring.restore_plan import (
    RestoreArguments,
    lists_restore_arguments,
    restore_arguments,
)
from flaxckpt.restoring.restore_report import RestoreReport
from flaxckpt.run.costs import Accounts, ScalarWriter, Stats
from flaxckpt.run.local_tier import LocalTier, RequestFn, open_tier
from flaxckpt.run.restore_step import OnCorrupt, RestoreRequest, StepSources
from flaxckpt.run.retention import Keep, best_first
from flaxckpt.run.run import Run, check_step, follow, warn_jumped_over
from flaxckpt.run.schedule import Every, Pacer
from flaxckpt.run.writer import Writer, log_removed
from flaxckpt.saving.save import SaveRequest
from flaxckpt.sharding.abstract import InitialState
from flaxckpt.sharding.specs import Rules, Specs
from flaxckpt.store.key_values import storage_key_values
from flaxckpt.store.locate import locate, locate_on_disk
from flaxckpt.tree import nnx_objects

logger = logging.getLogger("flaxckpt")
T = TypeVar("T")


class CheckpointManager:
    """Saves, keeps and restores the steps of one run.

    Used as a context manager, it waits for the save in flight at the end. So does a script that
    just ends. In a job of several processes, all of them make the same calls in the same order.

    Attributes:
      directory: the directory of the run.
      report: what the last restore did, leaf by leaf.
      items: the items that the last restore was asked for.
      preempted: whether the job is to end; the step of that call was saved.

    Example:
      >>> import jax.numpy as jnp
      >>> ckpt = flaxckpt.CheckpointManager(tmp_path / "run", save_every=flaxckpt.Every(steps=10))
      >>> state = ckpt.restore_or_init(lambda: {"w": jnp.zeros(3)})
      >>> for step in range(ckpt.next_step, 25):
      ...     saved = ckpt(step, state)
      >>> ckpt.close()
      >>> ckpt.steps()
      [0, 10, 20]
    """

    @checked(save_every=Every, keep=Keep, options=Options, local_every=Every)
    def __init__(
        self,
        directory: epath.PathLike,
        *,
        save_every: Every | None = None,
        keep: Keep = Keep(),
        async_: bool = True,
        if_busy: Literal["wait", "skip"] = "wait",
        options: Options = Options(),
        read_only: bool = False,
        local: epath.PathLike | None = None,
        local_every: Every = Every(steps=1),
        on_commit: Callable[[int, epath.Path], None] | None = None,
        writer: ScalarWriter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Opens the run in `directory`, and creates it when it is to be written.

        What a writer that died left half-written is removed.

        Args:
          directory: of the run; `s3://` and `gs://` URLs, relative paths and `~` work.
          save_every: when the manager, called in the loop, saves; by default at every call.
          keep: which steps are kept, by default all, and which metric ranks them.
          async_: whether a save returns once the state may change, and is written in the
            background.
          if_busy: what the manager, called in the loop, does while the save before is in flight:
            `wait` for it, or `skip` this one. (`save` always waits.)
          options: how to write and read.
          read_only: for evaluators; nothing is created, removed or saved.
          local: a directory on a disk of each host's own, for frequent saves beside those to
            `directory`; two are kept. What is newest, and there on every host, is restored.
          local_every: when the manager, called in the loop, saves there.
          on_commit: a function that is called with each step once it is committed, and with its
            path: for trackers and launchers. It is called in the background if saves are, and in a
            job of several processes on process 0. If it raises, the step is saved nonetheless, and
            the next call of the manager raises its error.
          writer: a CLU `MetricWriter`, or anything with `write_scalars(step, dict)`: it is told
            what each save cost, at the next call of the manager.
          clock: seconds, for time-based saves.

        Raises:
          DirectoryError: when the directory is a file, or may not be written.
        """
        if if_busy not in ("wait", "skip"):
            raise ValueError(f'if_busy must be "wait" or "skip", got {if_busy!r}')
        location = locate(directory, options)
        self.directory = epath.Path(location)
        self.report: RestoreReport | None = None
        self.items: dict[str, Any] = {}
        self._run = Run(location)
        self._keep, self._clock = keep, clock
        self._skip_if_busy, self._read_only, self._options = if_busy == "skip", read_only, options
        self._pacer = Pacer(save_every or Every(steps=1))
        self._accounts = Accounts(writer)

        def tell(step: int) -> None:
            if on_commit is not None:
                on_commit(step, self.path(step))

        self._writer = Writer(self._run, keep, options, self._accounts, tell, async_=async_)
        self._last_step: int | None = None
        self._restored_step: int | None = None
        # The newest step when an earlier one was restored by its number: all steps up to here come
        # after the restored one, on a branch that the loop has left.
        self._left_branch: int | None = None
        # How often the loop was sent to another step, and to which one last; for hooks.
        self._resumed = (0, -1)
        self._before_save: int | None = None
        self._damaged: set[int] = set()
        self._closed = False
        self._is_asked_to_end = self.preempted = False
        self._local_directory, self._local_every, self._async = local, local_every, async_
        self._tier: LocalTier | None = None
        if not read_only and location.store.can.locks:
            # A bucket that cannot be used is found out by the first request.
            location.store.prepare(location)
            log_removed(location.store.take_over(location))

    # Saving

    @checked()
    def __call__(
        self,
        step: Any,
        state: Any,
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        items: Mapping[str, Any] | None = None,
    ) -> bool:
        """Saves `state` if `save_every` says that `step` is due; returns whether it did.

        A step that exists is never saved again. Steps may jump, repeat, and be a `jax.Array`.

        Args:
          step: the step that `state` belongs to.
          state: the state, as for `save`.
          metrics: numbers by name, as for `save`.
          metadata: JSON for people and tools, as for `save`.
          items: the objects to save beside the state, as for `save`.

        Raises:
          BackgroundSaveError: if the save before this one failed.
          InvalidStepError: if the step is not an integer of at least zero.
          ManagerError: if `restore(step=...)` went back to an earlier step, and later ones are
            still in the run; see `rollback`.
        """
        request = SaveRequest(state, metrics, metadata, items)
        return self._visit(self._pacer, check_step(step), self._clock(), lambda: request)

    def _visit(self, pacer: Pacer, step: int, now: float, request_fn: RequestFn) -> bool:
        """Saves what `request_fn` gives if `pacer` says that `step` is due; whether it did."""
        self._raise_failure()
        warn_jumped_over(pacer, step)
        if not self._is_due(pacer, step, now, request_fn):
            return False
        return self._save_if_new(step, request_fn())

    def _is_due(self, pacer: Pacer, step: int, now: float, request_fn: RequestFn) -> bool:
        """Whether `step` is to be saved, to all processes alike.

        It is when `pacer` says so, or when the job is to end, and then `preempted` is set: jax's
        preemption service says so, or a signal came within `on_preemption`. On the way, the step
        is saved on the host's own disk, if it is due there.
        """
        ends = self._ends(step)
        self.preempted = self.preempted or ends
        if step != self._last_step and (tier := self._local_tier()) is not None:
            tier.save_if_due(step, self._clock(), request_fn)
        return pacer.decide_together(self._group, step, now) or ends

    def _ends(self, step: int) -> bool:
        """Whether the job is to end after `step`, and no call has saved for that reason yet."""
        if self.preempted:
            return False
        self._is_asked_to_end = self._is_asked_to_end or multihost.reached_preemption(step)
        return self._is_asked_to_end

    @checked()
    def should_save(self, step: Any) -> bool:
        """Whether `ckpt(step, state)` would save, for work that is only needed before a save.

        Such as gathering metrics or evaluating. Asking changes nothing. Steps that are only due on
        the hosts' own disks do not count. In a job of several processes, all of them ask.

        Args:
          step: the step, as for a call.

        Raises:
          InvalidStepError: if the step is not an integer of at least zero.
        """
        step = check_step(step)
        if step == self._last_step:
            return False
        due, broadcast = self._pacer.would(step, self._clock()), self._group.broadcast
        if self._pacer.every.is_timed:
            due = broadcast(f"asking whether step {step} is due", lambda: due)
        if not (due or self._ends(step)):
            return False
        # A damaged step is saved again.
        exists = broadcast(
            f"looking for step {step}", lambda: self._run.described(step) is not None
        )
        return step in self._damaged or not exists

    def ask_to_end(self) -> None:
        """Makes the next call save, whatever the schedule says, and set `preempted`.

        `on_preemption` calls it if a signal arrives. Call it for any other notice that the machine
        is about to be taken away.
        """
        self._is_asked_to_end = True

    def _save_if_new(self, step: int, request: SaveRequest) -> bool:
        """Saves a step that is due, unless it exists or the manager is to skip it."""
        if step == self._last_step:
            return False  # just restored, or saved, or being saved
        self._check_branch(step)
        broadcast = self._group.broadcast
        may_skip = self._skip_if_busy and not self.preempted
        if may_skip and broadcast("skipping a save", self._is_busy):
            logger.warning("step %d is not saved: the save before it is still running", step)
            return False
        began = self._clock()
        self.wait()
        self._pacer.lost += self._clock() - began
        damaged = step in self._damaged
        title = f"looking for step {step}"
        exists = broadcast(title, lambda: self._run.described(step) is not None)
        if exists and not damaged:
            logger.warning("step %d of %s exists and is not saved again", step, self.directory)
            return False
        if damaged and not self._run.directory.store.can.atomic_rename:
            # It is of no use.
            broadcast(f"deleting step {step}", lambda: self._run.delete(step))
        self._save(step, dataclasses.replace(request, overwrite=damaged))
        self._damaged.discard(step)
        return True

    @checked()
    def save(
        self,
        step: Any,
        state: Any,
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        items: Mapping[str, Any] | None = None,
        wait: bool = False,
        overwrite: bool = False,
    ) -> None:
        """Saves `state` as `step` now.

        When this returns, the state may be donated, deleted or changed, and so may the items. A
        save that is in flight is waited for first.

        Args:
          step: an integer of at least zero; a numpy or jax integer will do.
          state: any pytree: a TrainState, an nnx module, a tuple of them, ...
          metrics: numbers by name, for `Keep(best=...)` and `best_step()`.
          metadata: anything JSON can hold, for people and tools.
          items: the objects to save beside the state, by name; see `flaxckpt.save`.
          wait: whether to return only when the step is committed.
          overwrite: whether to replace the step if it exists.

        Raises:
          StepExistsError: when the step exists and `overwrite` is not set.
          StepPinnedError: when it is pinned.
          UnsupportedLeafError: when a leaf cannot be held; nothing was written then.
          ItemError: when an item cannot be held; nothing was written then.
          InvalidMetricError: when a metric is no number, or the one that decides is not among them.
          BackgroundSaveError: when the save before this one failed; this one was not begun.
        """
        self._save(step, SaveRequest(state, metrics, metadata, items, overwrite), wait=wait)

    def _save(self, step: Any, request: SaveRequest, *, wait: bool = False) -> None:
        """As `save`."""
        self._check_writable()
        step, began = check_step(step), self._clock()
        self._writer.save(step, request, self._group)
        self._before_save = self._last_step
        self._note(step)
        if wait:
            self.wait()
        self._pacer.paid(self._clock() - began)

    # Restoring

    @overload
    def restore(
        self,
        target: None = None,
        *,
        step: int | None = None,
        on_corrupt: OnCorrupt = "raise",
        items: Mapping[str, Any] | None = None,
        **how: Unpack[RestoreArguments],
    ) -> Any: ...
    @overload
    def restore(
        self,
        target: T,
        *,
        step: int | None = None,
        on_corrupt: OnCorrupt = "raise",
        items: Mapping[str, Any] | None = None,
        **how: Unpack[RestoreArguments],
    ) -> T: ...
    @checked()
    @lists_restore_arguments
    def restore(
        self,
        target: Any = None,
        *,
        step: int | None = None,
        on_corrupt: OnCorrupt = "raise",
        items: Mapping[str, Any] | None = None,
        **how: Unpack[RestoreArguments],
    ) -> Any:
        """Restores the newest step, or `step`. What was done is in `report` afterwards.

        Args:
          target: as for `flaxckpt.restore`.
          step: which step; by default the newest.
          on_corrupt: what happens when the step is damaged: `raise`, or restore the `previous` one
            that verifies, with a warning. A damaged step that is reached again is saved anew.
          items: which items, and what each is restored into; see `flaxckpt.restore_items`. They
            are in `items` afterwards.
          **how: `only`, `transforms`, `missing`, and whatever else `flaxckpt.restore` takes.

        Raises:
          CheckpointNotFoundError: when there is no such step, or it lacks an item.
          StructureMismatchError: when it does not fit the target.
          ItemError: when an item does not fit what it is to be restored into.
          CorruptCheckpointError: when bytes are missing or do not match their checksum.
        """
        arguments = restore_arguments(**how)
        tree = self._restore(RestoreRequest(target, arguments, step, on_corrupt, items))
        if step is not None and not self._read_only:
            newest = self._group.broadcast("looking for later steps", self._run.latest)
            self._left_branch = newest if newest is not None and newest > step else None
        return tree

    def _check_branch(self, step: int) -> None:
        """Refuses to save between the steps of a branch that the loop has left.

        Raises:
          ManagerError: if an earlier step was restored by its number, and there are later ones.
        """
        restored = self._restored_step
        if (
            self._left_branch is None
            or restored is None
            or not restored < step <= self._left_branch
        ):
            return
        newest = self._group.broadcast("looking for later steps", self._run.latest)
        if newest is None or newest <= restored:
            self._left_branch = None  # they were deleted
            return
        raise ManagerError(
            f"step {step} cannot be saved: step {restored} of {self.directory} was restored, but "
            f"the run has later steps, up to {newest}, and a restart would resume from those. Call "
            f"rollback({restored}) to set them aside, or save to another directory."
        )

    def _restore(self, request: RestoreRequest) -> Any:
        """As `restore`."""
        self.wait()
        step, tree, self.report, self.items = self._sources.restore(request)
        self._damaged.update(damaged for damaged, _ in self.report.damaged)
        logger.info("%s", self.report)
        self._accounts.restored(step, self.report)
        self._goes_on_from(step)
        self._restored_step = step
        return tree

    @checked()
    @lists_restore_arguments
    def restore_or_init(
        self,
        init_fn: Callable[..., T],
        *args: Any,
        mesh: Mesh | None = None,
        rules: Rules | None = None,
        specs: Specs | None = None,
        on_corrupt: OnCorrupt = "raise",
        items: Mapping[str, Any] | None = None,
        init_from: epath.PathLike | None = None,
        **how: Unpack[RestoreArguments],
    ) -> T:
        """The newest step, or when there is none `init_fn(*args)`, straight onto the mesh.

        Either way every leaf lies where `abstract_state` with these arguments says, and
        `last_step` tells which it was. When there are steps and all are damaged, that is an error.

        Args:
          init_fn: makes the state; so does, of only what it lacks, what a checkpoint lacks.
          *args: its arguments.
          mesh: as for `abstract_state`.
          rules: as for `abstract_state`.
          specs: as for `abstract_state`.
          on_corrupt: as for `restore`.
          items: as for `restore`; when there is no step yet, they are left alone.
          init_from: a checkpoint of any run, of any format that is read, to begin with when this
            run has no step yet.
          **how: as for `restore`. With `init_from` it is about that checkpoint only: a run that
            has begun goes on from its own steps, which must fit as they are.

        Raises:
          StructureMismatchError: when the step does not fit what `init_fn` makes.
          CorruptCheckpointError: when bytes are missing or do not match their checksum.
        """
        initial = InitialState(init_fn, args, mesh, rules, specs)
        arguments = restore_arguments(**how)
        self.wait()
        tree: T
        if not self._sources.is_empty():
            own = arguments if init_from is None else restore_arguments()
            here = RestoreRequest(initial.abstract, own, None, on_corrupt, items, initial.leaves)
            tree = self._restore(here)
        elif init_from is None:
            tree = initial.tree()
        else:
            source = open_source(init_from, self._options)
            tree, self.report = restore_tree(
                source, initial.abstract, arguments, self._options, initial.leaves
            )
            logger.info("%s", self.report)
        return tree

    @checked()
    @lists_restore_arguments
    def update(
        self,
        *objects: Any,
        step: int | None = None,
        on_corrupt: OnCorrupt = "raise",
        items: Mapping[str, Any] | None = None,
        **how: Unpack[RestoreArguments],
    ) -> int | None:
        """Restores nnx modules, optimizers and other nnx objects in place.

        Args:
          *objects: what was saved: `update(model)` after `save(step, model)`, and
            `update(model, optimizer)` after `save(step, (model, optimizer))`.
          step: which step; by default the newest.
          on_corrupt: as for `restore`.
          items: as for `restore`.
          **how: as for `restore`.

        Returns:
          The step that was restored; `None` when there was none, and nothing was changed.

        Raises:
          TypeError: when one is no nnx object.
          StructureMismatchError: when the step does not fit them; nothing was changed.
        """
        for value in objects:
            if not nnx_objects.is_object(value):
                raise TypeError(f"update takes nnx objects, got a {type(value).__name__}")
        self.wait()
        if step is None and self._sources.is_empty():
            return None
        target = objects[0] if len(objects) == 1 else objects
        found = nnx_objects.split(target)[0]
        arguments = restore_arguments(**how)
        restored = self._restore(RestoreRequest(found, arguments, step, on_corrupt, items))
        nnx_objects.update(objects, (restored,) if len(objects) == 1 else restored)
        return self._last_step

    # Steps

    def steps(self) -> list[int]:
        """The committed steps, in order."""
        return self._run.steps()

    def latest_step(self) -> int | None:
        """The newest committed step."""
        return self._run.latest()

    def best_step(self) -> int | None:
        """The committed step with the best metric; `None` if no step has the metric.

        The metric and its mode are those of this manager's `Keep`, else those that the run records.

        Raises:
          InvalidMetricError: if neither says whether the smallest or the largest value is best.
        """
        metric, mode = self._keep.metric, self._keep.mode
        if mode is None:
            metric, mode = self._run.ranking() or (None, None)
        if mode is not None:
            ranked = best_first(self._run.infos(metric), mode)
            return ranked[0].step if ranked else None
        names = {name: None for step in self.steps() for name in self.metrics(step)}
        if not names:
            return None
        raise InvalidMetricError(
            f"{self.directory} does not record which metric ranks its steps; they have "
            f"{', '.join(names)}. Open it with keep=Keep(metric={next(iter(names))!r}, mode=...), "
            'where mode is "min" or "max".'
        )

    @property
    def last_step(self) -> int | None:
        """The step that this manager saved or restored last."""
        return self._last_step

    @property
    def restored_step(self) -> int | None:
        """The step that this manager restored last."""
        return self._restored_step

    @property
    def next_step(self) -> int:
        """Where a loop goes on: after the step saved or restored last, else after the newest."""
        step = self.latest_step() if self._last_step is None else self._last_step
        return 0 if step is None else step + 1

    def path(self, step: int) -> epath.Path:
        """The path of `step`, whether or not it exists."""
        return self.directory / self._run.path(check_step(step)).name

    @checked()
    def inspect(self, step: int | None = None) -> CheckpointInfo:
        """Describes the newest step, or `step`, without reading arrays; see `flaxckpt.inspect`.

        Raises:
          CheckpointNotFoundError: if there is no such step.
        """
        step = self.latest_step() if step is None else check_step(step)
        self._run.existing(step)
        assert step is not None, "it exists"
        return inspect(self._run.path(step), options=self._options)

    @checked()
    def metrics(self, step: int) -> dict[str, float]:
        """The metrics that `step` was saved with.

        Raises:
          CheckpointNotFoundError: if there is no such step.
        """
        return dict(self._run.existing(step).metrics)

    @checked()
    def metadata(self, step: int) -> dict[str, Any]:
        """The metadata that `step` was saved with.

        Raises:
          CheckpointNotFoundError: if there is no such step.
        """
        return dict(self._run.existing(step).metadata)

    @checked()
    def follow(self, *, timeout_secs: float | None = None, poll_secs: float = 1.0) -> Iterator[int]:
        """Yields each step of the run that is newer than those before, as it is committed.

        Args:
          timeout_secs: the seconds without a new step after which it ends; by default never.
          poll_secs: the seconds between two looks.
        """
        return follow(self.steps, self._clock, timeout_secs, poll_secs)

    @checked()
    def pin(self, step: int, pinned: bool = True) -> None:
        """Keeps `step` for ever, or with `pinned=False` no longer.

        Raises:
          CheckpointNotFoundError: when there is no such step.
        """
        self._check_writable()
        self.wait()
        self._group.broadcast(f"pinning step {step}", lambda: self._run.pin(step, pinned=pinned))

    @checked()
    def delete(self, step: int) -> None:
        """Deletes `step`.

        Raises:
          CheckpointNotFoundError: when there is no such step.
          StepPinnedError: when it is pinned.
        """
        self._check_writable()
        self.wait()
        self._group.broadcast(f"deleting step {step}", lambda: self._run.delete(step))
        self._run.forget(step)

    @checked()
    def rollback(self, step: int) -> None:
        """Makes `step` the newest, so that training goes on from there, also after a restart.

        No reader sees the later steps any more, in the run or on the hosts' own disks. They are
        deleted after the next commit. The state of the loop is up to the caller: restore `step`
        before or after.

        Args:
          step: a committed step of the run.

        Raises:
          CheckpointNotFoundError: if there is no such step.
          StepPinnedError: if a later step is pinned; nothing was changed then.

        Example:
          >>> ckpt = flaxckpt.CheckpointManager(tmp_path / "run")
          >>> for step in range(5):
          ...     saved = ckpt(step, {"step": step})
          >>> ckpt.rollback(2)
          >>> ckpt.restore(), ckpt.next_step
          ({'step': 2}, 3)
        """
        self._check_writable()
        step = check_step(step)
        self.wait()
        later = self._group.broadcast(f"rolling back to {step}", lambda: self._run.later(step))
        # A restart takes the newest step of both, so a crash must not leave later local steps only.
        if (tier := self._local_tier()) is not None:
            tier.rollback(step)
        title = f"setting the steps after {step} aside"
        self._group.broadcast(title, lambda: self._run.set_aside(later))
        for gone in later:
            self._run.forget(gone)
            self._damaged.discard(gone)
        self._writer.may_have_aside = True
        self._left_branch = None
        self._goes_on_from(step)
        logger.info(
            "rolled %s back to step %d: %d steps set aside", self.directory, step, len(later)
        )

    def stats(self) -> Stats:
        """What the saves and restores of this manager have cost so far."""
        return self._accounts.stats

    def _goes_on_from(self, step: int) -> None:
        """Notes that the loop goes on from `step`, be it back or ahead."""
        self._note(step)
        self._resumed = (self._resumed[0] + 1, step)

    def _note(self, step: int) -> None:
        """Notes that the state of the loop is that of `step`, and is saved."""
        self._last_step = step
        self._pacer.saved(step, self._clock())

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Says what a name of Orbax's is called here."""
            raise no_attribute(self, name)

    # The processes of the job

    @functools.cached_property
    def _group(self) -> ProcessGroup:
        """The processes of the job, who all save and restore together."""
        key_values = functools.partial(storage_key_values, self._run.directory)
        return multihost.process_group(self._options.timeout_secs, key_values)

    def _local_tier(self) -> LocalTier | None:
        """The tier on the host's own disk, if there is to be one."""
        if self._tier is None and self._local_directory is not None:
            path, every = locate_on_disk(self._local_directory, self._options), self._local_every
            self._tier = open_tier(path, every, self._group, self._options, async_=self._async)
        return self._tier

    @functools.cached_property
    def _sources(self) -> StepSources:
        """Where steps are restored from."""
        return StepSources(self._run, self._local_tier(), self._group, self._options)

    # The background

    def _is_busy(self) -> bool:
        """Whether a save is in flight."""
        return self._writer.background.busy

    @property
    def last_error(self) -> BaseException | None:
        """What the last save that failed in the background raised."""
        return self._writer.background.last_error

    def _raise_failure(self) -> None:
        """Raises what the last save raised in the background, once; does not wait.

        Raises:
          BackgroundSaveError: from the original exception.
        """
        self._accounts.tell()
        try:
            self._writer.background.raise_failure()
        except BackgroundSaveError:
            # The step that failed was not saved: the loop may save it when it comes by again.
            self._last_step = self._pacer.last = self._before_save
            raise

    def wait(self) -> None:
        """Waits until the save in flight is committed.

        Raises:
          BackgroundSaveError: when it failed.
          SaveTimeoutError: when it takes longer than `Options.timeout_secs`.
        """
        self._writer.background.join()
        self._raise_failure()
        if self._tier is not None:
            self._tier.wait()

    def close(self) -> None:
        """Waits, and refuses further saves.

        Raises:
          BackgroundSaveError: when the save in flight failed.
        """
        self._closed = True
        self.wait()

    def __enter__(self) -> Self:
        """The manager."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes; when the block raised, that error is the one to be seen, a save's is logged."""
        if error is None:
            self.close()
            return
        self._closed = True
        self._writer.background.join()

    def _check_writable(self) -> None:
        """Refuses to write where that was excluded.

        Raises:
          ManagerError: when the manager is closed or read-only.
        """
        if self._closed or self._read_only:
            state = "closed" if self._closed else "read-only"
            how = "" if self._closed else " without read_only=True"
            raise ManagerError(
                f"the manager of {self.directory} is {state}. Open another one{how}."
            )
