"""Values for what a checkpoint lacks, and other dtypes."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np

from flaxckpt.errors import RuleError
from flaxckpt.leaves.dtypes import dtype_name, parse_dtype
from flaxckpt.leaves.record import ARRAY_KINDS, LeafSpec
from flaxckpt.restoring.derived import recast
from flaxckpt.restoring.leaf import Content, Leaf, as_leaf, content_of
from flaxckpt.transforms.rule import State, Target, array_of, matches

# Of numpy's kinds of dtypes; those of ml_dtypes are V.
_NUMERIC = "biufcV"


@dataclasses.dataclass(frozen=True)
class Fallback:
    """Gives the leaves of the target that `pattern` matches a value where the state has none.

    Attributes:
      pattern: a regular expression over the key paths of the target.
      value: one value for all of them; or `"target"`, for the value that the target has.
      optional: whether it may match nothing.
    """

    pattern: str
    value: Any | Literal["target"]
    optional: bool = False

    def __call__(self, state: State, target: Target) -> State:
        """The state with them at the end."""
        missing = [n for n in matches(self, self.pattern, target, self.optional) if n not in state]
        return state | {name: self._leaf(name, target[name]) for name in missing}

    def _leaf(self, name: str, in_target: Any) -> Leaf:
        """The leaf `name`."""
        if isinstance(self.value, str) and self.value == "target":
            return Leaf(name, lambda: content_of(in_target, name), is_initial=True)
        value = self.value
        shape, dtype = getattr(in_target, "shape", ()), getattr(in_target, "dtype", None)
        if isinstance(value, bool | int | float | complex) and isinstance(dtype, np.dtype):
            try:
                value = np.full(shape, value, dtype)
            except (OverflowError, TypeError, ValueError) as error:
                raise RuleError(
                    f"{self!r:.300} does not fit {name}, which is {dtype}{list(shape)}: {error}. "
                    "Give a value that it can hold."
                ) from None
        return as_leaf(value, name)


@dataclasses.dataclass(frozen=True)
class Cast:
    """Converts the arrays that `pattern` matches to `dtype`, whatever is lost by that.

    Attributes:
      pattern: a regular expression.
      dtype: a dtype or its name.
      optional: whether it may match nothing.
    """

    pattern: str
    dtype: Any
    optional: bool = False

    def __call__(self, state: State, target: Target) -> State:
        """The state with the arrays converted as they are read."""
        found, dtype = matches(self, self.pattern, state, self.optional), self._dtype()
        return {
            name: self._cast(leaf, dtype) if name in found and not leaf.is_initial else leaf
            for name, leaf in state.items()
        }

    def _dtype(self) -> str:
        """The name of the dtype.

        Raises:
          RuleError: when it is none that a checkpoint can hold.
        """
        try:
            if (name := dtype_name(np.dtype(self.dtype))) is not None:
                return name
        except TypeError:
            pass
        raise RuleError(
            f"{self} names no dtype that a checkpoint can hold. Give one of numpy or ml_dtypes, "
            "such as 'bfloat16'."
        )

    def _cast(self, leaf: Leaf, dtype: str) -> Leaf:
        """One leaf in the new dtype."""

        def content() -> Content:
            array = array_of(self, leaf)
            if parse_dtype(array.dtype).kind not in _NUMERIC:
                raise RuleError(
                    f"{self} cannot be used for {leaf.name}, which is {leaf.spec}. Let its pattern "
                    "match arrays of numbers only."
                )
            kind = leaf.spec.kind if leaf.spec.kind in ARRAY_KINDS else "numpy_scalar"
            return Content(LeafSpec(kind, dtype, array.shape), recast(array, dtype))

        return Leaf(leaf.name, content, origin=leaf.origin)
