"""Arrays of other sizes: padded, or cut."""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np

from flaxckpt.errors import RuleError
from flaxckpt.leaves.dtypes import parse_dtype
from flaxckpt.restoring.derived import resized
from flaxckpt.restoring.leaf import Content, Leaf
from flaxckpt.sharding.chunks import Shape
from flaxckpt.transforms.rule import State, Target, array_of, matches


@dataclasses.dataclass(frozen=True)
class Resize:
    """Gives arrays the shape that they have in the target: an embedding of a larger vocabulary.

    What both have in common, from index 0 on, stays where it is.

    Attributes:
      pattern: a regular expression.
      pad: the value of new elements; without it an axis must not grow.
      truncate: whether an axis may lose its last elements.
      optional: whether it may match nothing.

    Example:
      >>> import numpy as np
      >>> flaxckpt.save(tmp_path / "old", {"embedding": np.ones((2, 2))})
      >>> rule = flaxckpt.Resize("embedding", pad=0)
      >>> target = {"embedding": np.zeros((3, 2))}
      >>> flaxckpt.restore(tmp_path / "old", target, transforms=[rule])["embedding"].sum(axis=1)
      array([2., 2., 0.])
    """

    pattern: str
    pad: float | None = None
    truncate: bool = False
    optional: bool = False

    def __call__(self, state: State, target: Target) -> State:
        """The state with the arrays as large as those of the target."""
        found = matches(self, self.pattern, state, self.optional)
        return {
            name: self._resized(leaf, np.shape(target[name]))
            if name in found and name in target
            else leaf
            for name, leaf in state.items()
        }

    def _resized(self, leaf: Leaf, shape: Shape) -> Leaf:
        """`leaf` with `shape`.

        Raises:
          RuleError: when that is not allowed.
        """
        if leaf.is_initial:
            return leaf
        array = array_of(self, leaf)
        if array.shape == shape:
            return leaf
        pairs = list(zip(array.shape, shape, strict=False))
        if len(array.shape) != len(shape):
            why = "has another number of axes"
        elif self.pad is None and any(new > old for old, new in pairs):
            why = "would have to grow, and no pad= is given"
        elif not self.truncate and any(new < old for old, new in pairs):
            why = "would have to be cut, and truncate=True is not given"
        else:
            pad = 0.0 if self.pad is None else self.pad
            if self.pad is not None and not _is_held(pad, parse_dtype(array.dtype)):
                raise RuleError(
                    f"{self!r:.300}: {leaf.name} is {leaf.spec}, which holds no {pad}. Give a pad "
                    "that it can hold."
                )
            spec = leaf.spec._replace(shape=shape, weak_type=False)
            return Leaf(leaf.name, Content(spec, resized(array, shape, pad)), origin=leaf.origin)
        raise RuleError(
            f"{self!r:.300}: {leaf.name} {why}.\n  checkpoint: {array.shape}\n  target:     {shape}"
        )


def _is_held(pad: float, dtype: np.dtype) -> bool:
    """Whether arrays of `dtype` can have the element `pad`."""
    if math.isnan(pad):
        return bool(jax.dtypes.issubdtype(dtype, np.inexact))
    try:
        return bool(np.full((), pad, dtype) == pad)
    except (OverflowError, TypeError, ValueError):
        return False
