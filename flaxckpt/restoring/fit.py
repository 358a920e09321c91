"""How a checkpoint is to be fitted to a target: the arguments that every restore takes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict, get_args

from flaxckpt.errors import RuleError
from flaxckpt.leaves.convert import DtypePolicy
from flaxckpt.transforms.rule import Transform
from flaxckpt.tree.select import Only

Missing = Literal["error", "init"]
Unexpected = Literal["error", "ignore"]
OptimizerPolicy = Literal["match", "reset"]


class FitArguments(TypedDict, total=False):
    """The same, as keyword arguments; see `flaxckpt.restore`."""

    as_numpy: bool
    only: Only | None
    transforms: Sequence[Transform]
    missing: Missing | Mapping[str, Missing]
    unexpected: Unexpected | Mapping[str, Unexpected]
    dtype: DtypePolicy
    opt_state: OptimizerPolicy


@dataclasses.dataclass(frozen=True)
class Fit:
    """How a checkpoint is fitted to a target. The fields are the arguments of `flaxckpt.restore`.

    Raises:
      ValueError: when one is none of the values that it may have.
      RuleError: when a pattern is no regular expression.
    """

    as_numpy: bool = False
    only: Only | None = None
    transforms: Sequence[Transform] = ()
    missing: Missing | Mapping[str, Missing] = "error"
    unexpected: Unexpected | Mapping[str, Unexpected] = "error"
    dtype: DtypePolicy = "error"
    opt_state: OptimizerPolicy = "match"

    def __post_init__(self) -> None:
        """Refuses other values."""
        _check("missing", self.missing, get_args(Missing))
        _check("unexpected", self.unexpected, get_args(Unexpected))
        _check("dtype", self.dtype, get_args(DtypePolicy))
        _check("opt_state", self.opt_state, get_args(OptimizerPolicy))

    @property
    def is_lossy(self) -> bool:
        """Whether numbers may lose what the wanted dtype cannot hold."""
        return self.dtype == "cast"

    def initialises(self, name: str) -> bool:
        """Whether the leaf `name` of the target may be one that the checkpoint lacks."""
        return _policy(self.missing, name) == "init"

    def ignores(self, name: str) -> bool:
        """Whether the leaf `name` of the checkpoint may be one that the target lacks."""
        return _policy(self.unexpected, name) == "ignore"

    def check_patterns(self, saved: Sequence[str], target: Sequence[str]) -> None:
        """Refuses patterns that match no leaf of the side that they are about.

        Raises:
          RuleError: in that case.
        """
        for title, policy, names in (
            ("missing", self.missing, target),
            ("unexpected", self.unexpected, saved),
        ):
            for pattern in () if isinstance(policy, str) else policy:
                if not any(re.fullmatch(pattern, name) for name in names):
                    raise RuleError(
                        f"{title}={{{pattern!r}: ...}} matches no key path. Correct it."
                    )


def _check(title: str, value: object, allowed: Sequence[str]) -> None:
    """Refuses what is none of `allowed`, nor a dict of patterns to them."""
    if isinstance(value, Mapping):
        for pattern in value:
            _check_pattern(title, pattern)
    values = value.values() if isinstance(value, Mapping) else [value]
    if any(item not in allowed for item in values):
        raise ValueError(f"{title}={value!r} must be {' or '.join(allowed)}")


def _check_pattern(title: str, pattern: str) -> None:
    """Refuses what is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise RuleError(
            f"{title}={{{pattern!r}: ...}} is no regular expression: {error}. Correct it."
        ) from None


def _policy(policy: str | Mapping[str, str], name: str) -> str:
    """What holds for `name`: what the first pattern that matches says; otherwise an error."""
    if isinstance(policy, str):
        return policy
    return next((value for key, value in policy.items() if re.fullmatch(key, name)), "error")
