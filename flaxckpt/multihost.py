"""The processes of a job: barrier, broadcast and all-gather, with a timeout on every wait.

Process 0 coordinates, and all processes make the same collective operations in the same order.
Each operation has these keys in a key-value store, and each key is set once:

    broadcast, begun    by process 0; the others continue when the key is set
    gathering           by process 0, after it has done its own part
    arrived/<index>     by every other process, after it has done its part
    outcome             by process 0, after all processes have arrived

A process that fails sets its error in the keys that the others wait for, so nobody waits for a
process that will not come. A process that dies or hangs sets nothing; the others then time out, and
their error names the missing processes. The key-value store is never the source of truth about a
checkpoint: only the storage of the run is.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import queue
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import jax
import numpy as np
import orjson

from flaxckpt import errors, jax_private
from flaxckpt.errors import FlaxckptError, ProcessFailedError, ProcessTimeoutError

T = TypeVar("T")

# All keys that process 0 sets, last first. If it fails, it sets its error in all of them, in this
# order, so a process that finds the error in any key also finds it in the outcome.
_KEYS_OF_PROCESS_0 = ("outcome", "gathering", "begun", "broadcast")
# The keys of so many operations share a prefix and are deleted together: a loop whose saves depend
# on clocks has one broadcast in every step.
BLOCK = 64
# The timeout of one blocking get. Python handles Ctrl-C between two of them.
GET_SECS = 1.0
# How long a process that lost its files waits for the error of process 0, which deleted them.
FAILURE_SECS = 10.0
# How long process 0 pauses between two polls of who has arrived: at first, at most, and at most for
# each process of the job.
FIRST_POLL_SECS, LONGEST_POLL_SECS, POLL_SECS_PER_PROCESS = 0.001, 2.0, 0.01
# The timeout of the other processes relative to that of process 0, whose error says more.
GRACE = 1.1
# The timeout of the train loop for a save of several processes, whose errors say more too.
PATIENCE = 1.5
# How long a call to jax's coordination service may take. The service runs in process 0, or on a
# fast network.
ANSWER_SECS = 10.0


class ServiceTimeoutError(Exception):
    """The coordination service does not answer."""


class KeyValueStore(Protocol):
    """A store that all processes share. A key is set once and keeps its first value."""

    def set(self, key: str, value: str) -> None:
        """Sets `key` unless it is set already."""

    def get(self, key: str, timeout_secs: float) -> str | None:
        """The value of `key`, or `None` if it is not set within the timeout."""

    def get_prefix(self, prefix: str) -> dict[str, str]:
        """The values of all keys below `prefix` and a slash, by the rest of the key.

        Raises:
          ServiceTimeoutError: if the service does not answer.
        """

    def delete_prefix(self, prefix: str) -> None:
        """Deletes all keys below `prefix` and a slash."""


@dataclasses.dataclass
class ProcessGroup:
    """The processes of a job.

    Attributes:
      index: index of this process.
      count: number of processes.
      key_values: the key-value store that they share; `None` for a single-process job.
      timeout_secs: how long the processes wait for one another.
      clock: returns the time in seconds.
    """

    index: int
    count: int
    key_values: KeyValueStore | None
    timeout_secs: float
    clock: Callable[[], float] = time.monotonic
    _numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    _deleted_blocks: int = 0

    @property
    def is_process_0(self) -> bool:
        """Whether this is process 0, which coordinates."""
        return self.index == 0

    @property
    def process(self) -> int | None:
        """The index of this process; `None` in a single-process job."""
        return None if self.count == 1 else self.index

    def collective(self, title: str) -> Collective:
        """The next operation of all processes; errors call it by its `title`."""
        return Collective(self, next(self._numbers), title)

    def broadcast(self, title: str, make: Callable[[], T]) -> T:
        """The value that process 0 makes, on all processes. See `Collective.broadcast`."""
        return self.collective(title).broadcast(make)

    def delete_before(self, number: int) -> None:
        """Deletes the keys of operations that all processes have finished, in whole blocks."""
        assert self.key_values is not None, "a single-process job sets no keys"
        for block in range(self._deleted_blocks, number // BLOCK):
            self.key_values.delete_prefix(str(block))
        self._deleted_blocks = max(self._deleted_blocks, number // BLOCK)


SINGLE_PROCESS = ProcessGroup(0, 1, None, 0.0)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One operation in which all processes of `group` take part."""

    group: ProcessGroup
    number: int
    title: str

    def broadcast(self, make: Callable[[], T]) -> T:
        """The value that process 0 makes, on all processes; it must be JSON data.

        Raises:
          FlaxckptError: the error that `make` raised, on all processes.
          ProcessFailedError: the same, if the error was not a `FlaxckptError`.
          ProcessTimeoutError: if process 0 does not arrive.
        """
        if not self.group.is_process_0:
            received: T = self.wait_for("broadcast")
            return received
        with self.sharing_errors():
            made = make()
        self.publish("broadcast", made)
        return made

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all processes, by their indices; they must be JSON data.

        Raises:
          ProcessFailedError: if another process failed.
          ProcessTimeoutError: if another process did not arrive.
        """
        if not self.group.is_process_0:
            received: list[Any] = self.arrive(value)
            return received
        with self.sharing_errors():
            values = [value, *self.gather()]
        self.publish("outcome", values)
        return values

    @contextlib.contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """Lets all other processes fail if the block fails."""
        try:
            yield
        except BaseException as error:
            index, kind = self.group.index, type(error).__name__
            keys = _KEYS_OF_PROCESS_0 if self.group.is_process_0 else (f"arrived/{index}",)
            for key in keys:
                self._set(key, {"failure": {"process": index, "type": kind, "text": str(error)}})
            raise

    def publish(self, key: str, value: Any) -> None:
        """Sets `key` to `value`, on process 0."""
        self._set(key, {"value": value})

    def gather(self) -> list[Any]:
        """The values with which all other processes arrived, by their indices; on process 0.

        Raises:
          ProcessFailedError: if another process failed.
          ProcessTimeoutError: if another process did not arrive.
        """
        group, pause = self.group, FIRST_POLL_SECS
        if group.key_values is None:
            return []
        self.publish("gathering", None)
        end = group.clock() + group.timeout_secs
        while len(arrived := self._arrived()) < group.count - 1:
            if group.clock() > end:
                raise self._timeout(arrived)
            time.sleep(pause)
            # Each poll reads all values, so a large job polls less often.
            pause = min(2 * pause, LONGEST_POLL_SECS, group.count * POLL_SECS_PER_PROCESS)
        group.delete_before(self.number)
        return [arrived[index] for index in range(1, group.count)]

    def arrive(self, value: Any) -> Any:
        """Arrives with `value`, waits for all processes, and returns the outcome; not on process 0.

        Raises:
          ProcessFailedError: if another process failed.
          ProcessTimeoutError: if another process did not arrive.
        """
        self._set(f"arrived/{self.group.index}", {"value": value})
        self.wait_for("gathering")
        return self.wait_for("outcome")

    def wait_for(self, key: str) -> Any:
        """Waits for a key of process 0, and returns its value.

        Raises:
          FlaxckptError: the error of process 0, if it failed.
          ProcessTimeoutError: if the key is not set in time.
        """
        group = self.group
        assert group.key_values is not None
        end = group.clock() + GRACE * group.timeout_secs
        while (text := group.key_values.get(self._path(key), GET_SECS)) is None:
            if group.clock() > end:
                raise self._timeout(self._arrived_if_known() if key == "outcome" else None)
        return self._value(text)

    def raise_failure_of_process_0(self) -> None:
        """Raises the error of process 0, if it has failed or fails within a moment.

        Raises:
          ProcessFailedError: in that case.
        """
        group = self.group
        assert group.key_values is not None, "there is another process"
        timeout_secs = min(FAILURE_SECS, group.timeout_secs)
        if (text := group.key_values.get(self._path("outcome"), timeout_secs)) is not None:
            self._value(text)

    def has_failed(self) -> bool:
        """Whether process 0 has failed. It commits nothing after that."""
        key_values = self.group.key_values
        text = None if key_values is None else key_values.get(self._path("outcome"), 0.0)
        return text is not None and "failure" in orjson.loads(text)

    def _path(self, key: str) -> str:
        return f"{self.number // BLOCK}/{self.number}/{key}"

    def _set(self, key: str, message: dict[str, Any]) -> None:
        if self.group.key_values is not None:
            text = orjson.dumps({"title": self.title, **message}).decode()
            self.group.key_values.set(self._path(key), text)

    def _arrived(self) -> dict[int, Any]:
        """The values with which other processes have arrived so far, by their indices."""
        assert self.group.key_values is not None
        found = self.group.key_values.get_prefix(self._path("arrived"))
        return {int(index): self._value(text) for index, text in found.items()}

    def _arrived_if_known(self) -> dict[int, Any] | None:
        try:
            return self._arrived()
        except ServiceTimeoutError:
            return None

    def _value(self, text: str) -> Any:
        """The value of a key, or the error that is in its place."""
        message = orjson.loads(text)
        if (failure := message.get("failure")) is None:
            if message["title"] != self.title:
                raise ProcessFailedError(
                    f"{self.title}: another process is {message['title']} instead. All processes "
                    "must make the same calls in the same order."
                )
            return message["value"]
        index, name, text = failure["process"], failure["type"], failure["text"]
        kind = getattr(errors, name, None)
        # An error of flaxckpt's on process 0 concerns all processes, so all of them raise it. A
        # StructureMismatchError cannot be constructed from its text.
        if index == 0 and isinstance(kind, type) and kind is not errors.StructureMismatchError:
            raise kind(text)
        why = text.rstrip(".")
        raise ProcessFailedError(
            f"{self.title} failed on process {index}: {name}: {why}. See the log there."
        )

    def _timeout(self, arrived: dict[int, Any] | None) -> FlaxckptError:
        """The error of a timeout; it blames process 0 if `arrived` is unknown or complete."""
        group = self.group
        missing = [0]
        if arrived is not None:
            missing = [i for i in range(1, group.count) if i not in arrived] or [0]
        who = ", ".join(map(str, missing[:20])) + (", ..." if len(missing) > 20 else "")
        plural = "process" if len(missing) == 1 else f"{len(missing)} processes:"
        return ProcessTimeoutError(
            f"{self.title}: {plural} {who} did not reach this barrier within "
            f"{group.timeout_secs:g} s. Check the log there, or raise Options(timeout_secs=...)."
        )


def process_group(timeout_secs: float, fallback: Callable[[str], KeyValueStore]) -> ProcessGroup:
    """The processes of this job. Every process must call this.

    Without `jax.distributed` the job has a single process, and jax is not asked for devices.

    Args:
      timeout_secs: how long the processes wait for one another.
      fallback: opens a key-value store with the given name in the storage of the run, for a jax
        whose coordination service is missing or has changed.
    """
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return SINGLE_PROCESS
    name = _unique_name()
    key_values: KeyValueStore
    if client := jax_private.coordination_client():
        answer_secs = min(ANSWER_SECS, timeout_secs / 2)
        key_values = CoordinationKeyValueStore(client, f"flaxckpt/{name}", answer_secs)
    else:
        key_values = fallback(name)
    return ProcessGroup(jax.process_index(), jax.process_count(), key_values, timeout_secs)


def _unique_name() -> str:
    """A name that no process group has had, the same on all processes.

    This is the only collective on the devices. It runs once for a manager, on the caller's thread:
    on another thread it could deadlock with the collectives of a train step.
    """
    from jax.experimental import multihost_utils

    ours = np.frombuffer(uuid.uuid4().bytes, np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(ours), np.uint8)).hex()


def reached_preemption(step: int) -> bool:
    """Whether all processes have agreed to save `step` because the job is being preempted.

    After a process gets SIGTERM, jax's preemption service agrees on one step a little later, and
    only for that step this is true.
    """
    if not jax.distributed.is_initialized():
        return False
    from jax.experimental import multihost_utils

    try:
        return bool(multihost_utils.reached_preemption_sync_point(step))
    except RuntimeError:  # jax_enable_preemption_service is off
        return False


class CoordinationKeyValueStore:
    """The key-value store of jax's coordination service, whose errors differ only in their texts.

    The service runs in process 0. If that process is stopped, a call never returns, whatever its
    deadline. Therefore each call is made by a thread that can be abandoned.
    """

    def __init__(self, client: Any, prefix: str, answer_secs: float = ANSWER_SECS):
        """Prepends `prefix` to all keys, and waits at most `answer_secs` for the service."""
        self._client, self._prefix, self._answer_secs = client, prefix, answer_secs
        self._callers = threading.local()

    def set(self, key: str, value: str) -> None:
        """See `KeyValueStore`. Ignores a timeout: no process could learn of it."""
        with contextlib.suppress(ServiceTimeoutError):
            try:
                self._call(self._answer_secs, "key_value_set", f"{self._prefix}/{key}", value)
            except jax.errors.JaxRuntimeError as error:
                if "ALREADY_EXISTS" not in str(error):
                    raise

    def get(self, key: str, timeout_secs: float) -> str | None:
        """See `KeyValueStore`."""
        path = f"{self._prefix}/{key}"
        try:
            # With a deadline near zero, a blocking get would often miss a key that is set.
            if not timeout_secs:
                return str(self._call(self._answer_secs, "key_value_try_get", path))
            milliseconds = max(1, round(timeout_secs * 1000))
            return str(self._call(timeout_secs + 1.0, "blocking_key_value_get", path, milliseconds))
        except ServiceTimeoutError:
            return None
        except jax.errors.JaxRuntimeError as error:
            if not any(known in str(error) for known in ("DEADLINE_EXCEEDED", "NOT_FOUND")):
                raise
            return None

    def get_prefix(self, prefix: str) -> dict[str, str]:
        """See `KeyValueStore`."""
        path = f"{self._prefix}/{prefix}/"
        found = self._call(self._answer_secs, "key_value_dir_get", path)
        return {key[len(path) :]: value for key, value in found}

    def delete_prefix(self, prefix: str) -> None:
        """See `KeyValueStore`."""
        self._call(self._answer_secs, "key_value_delete", f"{self._prefix}/{prefix}/")

    def _call(self, timeout_secs: float, method: str, *args: Any) -> Any:
        if not hasattr(
            self._callers, "mine"
        ):  # one for each thread, so that none waits for another
            self._callers.mine = _Caller()
        call = functools.partial(getattr(self._client, method), *args)
        return self._callers.mine.call(call, timeout_secs)


class _Caller:
    """A daemon thread that makes calls for another thread, which can stop waiting for a call."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        weakref.finalize(self, self._calls.put, None)  # the thread ends with this object
        serve = functools.partial(_serve, self._calls)
        threading.Thread(target=serve, name="flaxckpt-key-values", daemon=True).start()

    def call(self, function: Callable[[], T], timeout_secs: float) -> T:
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._calls.put((future, function))
        done, _ = concurrent.futures.wait([future], timeout_secs)
        if not done:
            raise ServiceTimeoutError(f"no answer within {timeout_secs:g} s")
        return future.result()


def _serve(calls: queue.SimpleQueue[Any]) -> None:
    while (found := calls.get()) is not None:
        future, function = found
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            future.set_exception(error)
