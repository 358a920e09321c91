"""Leaves that move, and leaves that are left out."""

from __future__ import annotations

import dataclasses
import re

from flaxckpt.transforms.rule import State, Target, expand, matches, merged


@dataclasses.dataclass(frozen=True)
class Rename:
    r"""Moves each leaf that `pattern` matches to the key path that `replacement` makes of it.

    Attributes:
      pattern: a regular expression.
      replacement: as for `re.sub`, with the groups of `pattern`.
      optional: whether it may match nothing.

    Example:
      >>> flaxckpt.save(tmp_path / "old", {"classifier": {"kernel": 1}})
      >>> rule = flaxckpt.Rename("classifier/(.*)", r"head/\1")
      >>> flaxckpt.restore(tmp_path / "old", {"head": {"kernel": 0}}, transforms=[rule])
      {'head': {'kernel': 1}}
    """

    pattern: str
    replacement: str
    optional: bool = False

    def __call__(self, state: State, target: Target) -> State:
        """The state with the new names, in the old order."""
        found = matches(self, self.pattern, state, self.optional)
        return merged(self, ((self._name(found.get(n), n), leaf) for n, leaf in state.items()))

    def _name(self, match: re.Match[str] | None, name: str) -> str:
        """What `name` becomes."""
        return name if match is None else expand(self, match, self.replacement)


@dataclasses.dataclass(frozen=True)
class Drop:
    """Takes out each leaf that `pattern` matches; it is not read.

    Attributes:
      pattern: a regular expression.
      optional: whether it may match nothing.
    """

    pattern: str
    optional: bool = False

    def __call__(self, state: State, target: Target) -> State:
        """The state without them."""
        found = matches(self, self.pattern, state, self.optional)
        return {name: leaf for name, leaf in state.items() if name not in found}
