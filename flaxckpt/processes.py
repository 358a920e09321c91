"""The processes of a job: how many there are, and where they leave notes for one another.

jax has a coordination service for that, and no public interface to it. `CoordinationBoard` is the
one place that calls it; where it is missing or has changed, notes go to the storage instead.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from flaxckpt.agreement import ALONE, Group


class Board(Protocol):
    """Where processes leave notes. A note is never changed."""

    def post(self, name: str, text: str) -> None:
        """Leaves a note, unless there is one of that name."""

    def read(self, name: str, wait_secs: float) -> str | None:
        """A note, waited for at most so long; `None` when there is none by then."""

    def below(self, name: str) -> dict[str, str]:
        """All notes whose names begin with `name` and a slash, by the rest of their names."""

    def remove(self, name: str) -> None:
        """Removes all notes whose names begin with `name` and a slash."""


class CoordinationBoard:
    """Notes in jax's coordination service. Its errors are told apart by their texts only."""

    def __init__(self, client: Any, prefix: str):
        """Notes whose names the service has with `prefix` before them."""
        self._client, self._prefix = client, prefix

    def post(self, name: str, text: str) -> None:
        """See `Board`."""
        try:
            self._client.key_value_set(f"{self._prefix}/{name}", text)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise

    def read(self, name: str, wait_secs: float) -> str | None:
        """See `Board`."""
        try:
            milliseconds = max(1, round(wait_secs * 1000))
            found = self._client.blocking_key_value_get(f"{self._prefix}/{name}", milliseconds)
            return str(found)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None

    def below(self, name: str) -> dict[str, str]:
        """See `Board`."""
        prefix = f"{self._prefix}/{name}/"
        found = self._client.key_value_dir_get(prefix)
        return {key[len(prefix) :]: text for key, text in found}

    def remove(self, name: str) -> None:
        """See `Board`."""
        self._client.key_value_delete(f"{self._prefix}/{name}/")


def client() -> Any:
    """Jax's own client of its coordination service; `None` when this jax has none, or another."""
    try:
        from jax._src.distributed import global_state

        found = global_state.client
    except (ImportError, AttributeError):
        return None
    needed = ("key_value_set", "blocking_key_value_get", "key_value_dir_get", "key_value_delete")
    return found if all(hasattr(found, name) for name in needed) else None


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
    board = fallback(name) if service is None else CoordinationBoard(service, f"flaxckpt/{name}")
    return Group(jax.process_index(), jax.process_count(), board, timeout_secs)


def _shared_name() -> str:
    """A name that no group has had, the same on all processes.

    This is the only collective of a save, on the caller's thread and once for a manager: one from
    another thread would wait for ever beside those of a train step.
    """
    from jax.experimental import multihost_utils

    ours = np.frombuffer(uuid.uuid4().bytes, np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(ours), np.uint8)).hex()
