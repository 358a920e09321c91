"""Leaves that are computed from leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flaxckpt.errors import RuleError
from flaxckpt.restoring.leaf import Content, Leaf, content_of
from flaxckpt.transforms.rule import State, Target, expand, matches, merged


@dataclasses.dataclass(frozen=True)
class Apply:
    """Computes leaves from leaves.

    With a `pattern`, each leaf that it matches becomes `fn(path, array)`. With `inputs` and an
    `output`, `fn(path, array, array, ...)` makes one leaf of several: each of `inputs` is a
    pattern, and those of its matches that `output` gives one path belong together. The inputs are
    taken out, unless `keep` is set. Arrays are given as numpy arrays, on the host, and whole; the
    results that are needed are all on the host until the restore ends.

    Attributes:
      pattern: a regular expression.
      fn: makes the value: an array, or anything a checkpoint can hold.
      inputs: regular expressions.
      output: the key path of the result, as the replacement of `re.sub`.
      keep: whether the inputs stay.
      optional: whether it may match nothing.

    Example:
      >>> import numpy as np
      >>> flaxckpt.save(tmp_path / "old", {"q": np.ones(2), "k": np.zeros(2)})
      >>> join = flaxckpt.Apply(
      ...     inputs=["q", "k"], output="qk", fn=lambda path, *parts: np.stack(parts))
      >>> flaxckpt.restore(tmp_path / "old", transforms=[join])["qk"].shape
      (2, 2)
    """

    pattern: str | None = None
    fn: Callable[..., Any] | None = None
    _: dataclasses.KW_ONLY
    inputs: Sequence[str] = ()
    output: str | None = None
    keep: bool = False
    optional: bool = False

    def __post_init__(self) -> None:
        """Refuses what is neither of the two forms."""
        several = bool(self.inputs) and self.output is not None and self.pattern is None
        single = self.pattern is not None and not self.inputs and self.output is None
        if self.fn is None or not (several or single) or (single and self.keep):
            raise ValueError(
                "Apply takes pattern and fn, or inputs, output and fn (and keep), got "
                f"{self!r:.300}"
            )

    def __call__(self, state: State, target: Target) -> State:
        """The state with the results at the end."""
        patterns = [self.pattern] if self.pattern is not None else self.inputs
        output = r"\g<0>" if self.output is None else self.output
        groups: dict[str, list[str]] = {}
        for number, pattern in enumerate(patterns):
            for name, match in matches(self, pattern, state, self.optional).items():
                groups.setdefault(expand(self, match, output), []).append(name)
                if len(groups[expand(self, match, output)]) != number + 1:
                    raise self._unequal(groups)
        if any(len(names) != len(patterns) for names in groups.values()):
            raise self._unequal(groups)
        used = {name for names in groups.values() for name in names}
        left = {n: leaf for n, leaf in state.items() if self.keep or n not in used}
        made = ((out, self._made(out, [state[n] for n in names])) for out, names in groups.items())
        return merged(self, [*left.items(), *made])

    def _made(self, path: str, inputs: Sequence[Leaf]) -> Leaf:
        """The leaf at `path`; it is computed when it turns out to be needed."""

        def compute() -> Content:
            assert self.fn is not None
            value = self.fn(path, *(leaf.read() for leaf in inputs))
            content = content_of(value, path)
            kind = inputs[0].spec.kind
            if {kind, content.spec.kind} <= {"jax", "numpy"}:
                content = content._replace(spec=content.spec._replace(kind=kind))
            return content

        return Leaf(path, compute)

    def _unequal(self, groups: Mapping[str, Sequence[str]]) -> RuleError:
        """The error of inputs that do not come in groups of the right size."""
        wrong = "; ".join(f"{out} of {', '.join(names)}" for out, names in groups.items())
        return RuleError(
            f"{self!r:.300} must find one leaf for each of its inputs, and makes {wrong}. Give "
            "inputs whose groups lead to one output each."
        )
