"""What a step knows of the saves before it, in the `flaxckpt` object of its `_METADATA`.

Nothing is decided by it. It is there so that people can be told of steps that are gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

# So many saves are remembered.
MAX_PAST = 200


class PastSave(NamedTuple):
    """A save of the same run.

    Attributes:
      step: its step.
      time: when it was committed, in seconds since 1970.
      seconds: from the call until then.
      blocked_seconds: for how long of that the loop waited.
      leaves: how many leaves it has.
      nbytes: the size of its arrays, in bytes.
      metrics: its metrics, but for those that JSON cannot hold.
    """

    step: int
    time: float
    seconds: float
    blocked_seconds: float
    leaves: int
    nbytes: int
    metrics: Mapping[str, float]


def encode_past(past: Iterable[PastSave]) -> list[list[Any]]:
    """As JSON: a list for each save, in the order of the attributes."""
    return [list(save) for save in past]


def decode_past(data: Any) -> tuple[PastSave, ...]:
    """What `encode_past` gave.

    Raises:
      ValueError: when it is something else.
    """
    return tuple(_decode(*entry) for entry in data)


def _decode(
    step: Any, time: Any, seconds: Any, blocked: Any, leaves: Any, nbytes: Any, metrics: Any
) -> PastSave:
    """One save."""
    values = {str(name): float(value) for name, value in metrics.items()}
    return PastSave(
        int(step), float(time), float(seconds), float(blocked), int(leaves), int(nbytes), values
    )
