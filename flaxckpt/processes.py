"""The processes of a job: how many there are, and where they leave notes for one another.

jax has a coordination service for that, and no public interface to it. `CoordinationBoard` is the
one place that calls it; where it is missing or has changed, notes go to the storage instead.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import queue
import threading
import uuid
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from flaxckpt.agreement import ALONE, Group
from flaxckpt.board import Board, SilentBoardError

T = TypeVar("T")

# The service is a part of this process or one on a fast network.
ANSWER_SECS = 10.0


class CoordinationBoard:
    """Notes in jax's coordination service. Its errors are told apart by their texts only.

    The service is a part of process 0. When that is stopped, a call to it never returns, whatever
    its deadline; so each is made by a thread that can be left to itself.
    """

    def __init__(self, client: Any, prefix: str, answer_secs: float = ANSWER_SECS):
        """Notes that the service has with `prefix` before their names; it answers in so long."""
        self._client, self._prefix, self._answer_secs = client, prefix, answer_secs
        self._callers = threading.local()

    def post(self, name: str, text: str) -> None:
        """See `Board`; nobody can be told when there is no answer."""
        with contextlib.suppress(SilentBoardError):
            try:
                self._call(self._answer_secs, "key_value_set", f"{self._prefix}/{name}", text)
            except jax.errors.JaxRuntimeError as error:
                if "ALREADY_EXISTS" not in str(error):
                    raise

    def read(self, name: str, wait_secs: float) -> str | None:
        """See `Board`."""
        key = f"{self._prefix}/{name}"
        try:
            # With a deadline of next to nothing, a note that is there would often come too late.
            if not wait_secs:
                return str(self._call(self._answer_secs, "key_value_try_get", key))
            milliseconds = max(1, round(wait_secs * 1000))
            return str(self._call(wait_secs + 1.0, "blocking_key_value_get", key, milliseconds))
        except SilentBoardError:
            return None
        except jax.errors.JaxRuntimeError as error:
            if not any(known in str(error) for known in ("DEADLINE_EXCEEDED", "NOT_FOUND")):
                raise
            return None

    def below(self, name: str) -> dict[str, str]:
        """See `Board`."""
        prefix = f"{self._prefix}/{name}/"
        found = self._call(self._answer_secs, "key_value_dir_get", prefix)
        return {key[len(prefix) :]: text for key, text in found}

    def remove(self, name: str) -> None:
        """See `Board`."""
        self._call(self._answer_secs, "key_value_delete", f"{self._prefix}/{name}/")

    def _call(self, timeout_secs: float, method: str, *args: Any) -> Any:
        """What the client's `method` returns."""
        if not hasattr(self._callers, "mine"):  # one for each thread: they do not wait for another
            self._callers.mine = _Caller()
        call = functools.partial(getattr(self._client, method), *args)
        return self._callers.mine.call(call, timeout_secs)


class _Caller:
    """A daemon thread that makes calls; whoever waits for one may stop waiting."""

    def __init__(self) -> None:
        """No call yet; the thread ends with this object."""
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        weakref.finalize(self, self._calls.put, None)
        serve = functools.partial(_serve, self._calls)
        threading.Thread(target=serve, name="flaxckpt-notes", daemon=True).start()

    def call(self, function: Callable[[], T], timeout_secs: float) -> T:
        """What `function` returns.

        Raises:
          SilentBoardError: when it does not return in time.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._calls.put((future, function))
        done, _ = concurrent.futures.wait([future], timeout_secs)
        if not done:
            raise SilentBoardError(f"no answer within {timeout_secs:g} s")
        return future.result()


def _serve(calls: queue.SimpleQueue[Any]) -> None:
    """Makes one call after the other until there is a `None`."""
    while (found := calls.get()) is not None:
        future, function = found
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            future.set_exception(error)


def client() -> Any:
    """Jax's own client of its coordination service; `None` when this jax has none, or another."""
    try:
        from jax._src.distributed import global_state

        found = global_state.client
    except (ImportError, AttributeError):
        return None
    needed = ("set", "try_get", "dir_get", "delete")
    has_all = all(hasattr(found, f"key_value_{name}") for name in needed)
    return found if has_all and hasattr(found, "blocking_key_value_get") else None


def join(timeout_secs: float, fallback: Callable[[str], Board]) -> Group:
    """The processes of this job; every one of them must call this.

    Without `jax.distributed` a process is alone, and no device is asked for.

    Args:
      timeout_secs: how long processes wait for one another.
      fallback: makes a board of that name in the storage.
    """
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return ALONE
    name = _shared_name()
    service = client()
    answer_secs = min(ANSWER_SECS, timeout_secs / 2)
    prefix = f"flaxckpt/{name}"
    board = CoordinationBoard(service, prefix, answer_secs) if service else fallback(name)
    return Group(jax.process_index(), jax.process_count(), board, timeout_secs)


def _shared_name() -> str:
    """A name that no group has had, the same on all processes.

    This is the only collective of a save, on the caller's thread and once for a manager: one from
    another thread would wait for ever beside those of a train step.
    """
    from jax.experimental import multihost_utils

    ours = np.frombuffer(uuid.uuid4().bytes, np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(ours), np.uint8)).hex()
