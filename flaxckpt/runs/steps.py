"""The steps that a loop comes by, as it gives them."""

from __future__ import annotations

import operator
import warnings
from typing import Any

from flaxckpt.errors import InvalidStepError
from flaxckpt.schedule import Pacer


def check_step(step: Any) -> int:
    """`step` as an int: Python, numpy and jax integers are accepted.

    Raises:
      InvalidStepError: for anything else, and for negative numbers.
    """
    try:
        if isinstance(step, bool):
            raise TypeError
        number = operator.index(step)
    except TypeError:
        raise InvalidStepError(f"a step must be an integer, got {step!r}. Pass an int.") from None
    if number < 0:
        raise InvalidStepError(f"a step must not be negative, got {number}. Count from 0.")
    return number


def warn_jumped_over(pacer: Pacer, step: int) -> None:
    """Warns when the loop never came by a step at which a save was asked for."""
    if pacer.last is not None and (missed := pacer.every.jumped_over(step, last=pacer.last)):
        warnings.warn(
            f"the loop went from step {pacer.last} to {step} and never came by "
            f"{', '.join(map(str, missed))}, where a save was asked for; saving {step} instead",
            stacklevel=3,
        )
