"""Subtrees of a state: which there are, and how many bytes each has. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

ROOT = "(the whole state)"


@dataclasses.dataclass(frozen=True)
class Subtree:
    """A part of a state.

    Attributes:
      name: its key path; empty for all of it.
      nbytes: the size of its arrays, in bytes.
      leaves: how many leaves it has.
    """

    name: str
    nbytes: int
    leaves: int

    @property
    def parent(self) -> str | None:
        """The key path of what it is directly in; that of a single key is in the whole state."""
        return self.name.rpartition("/")[0] if self.name else None

    @property
    def label(self) -> str:
        """Its last key."""
        return self.name.rpartition("/")[2] or ROOT


def prefix(name: str, depth: int) -> str:
    """The first `depth` keys of the key path `name`."""
    return "/".join(name.split("/")[:depth])


def fitting_depth(names: Collection[str], most: int) -> int:
    """How many keys tell at most `most` subtrees apart; at least one.

    Example:
      >>> fitting_depth(["params/a/w", "params/b/w", "step"], 3)
      3
      >>> fitting_depth(["params/a/w", "params/b/w", "step"], 2)
      1
    """
    deepest = max((name.count("/") + 1 for name in names), default=1)
    for depth in range(1, deepest + 1):
        if len({prefix(name, depth) for name in names}) > most:
            return max(1, depth - 1)
    return deepest


def subtrees(leaves: Mapping[str, int], most: int) -> list[Subtree]:
    """All subtrees that have bytes, down to the depth of which there are at most `most`.

    Args:
      leaves: the size in bytes of each leaf, by key path.
      most: how many there may be at the deepest level.

    Example:
      >>> [(s.name, s.nbytes) for s in subtrees({"params/w": 8, "params/b": 2, "step": 4}, 10)]
      [('', 14), ('params', 10), ('params/w', 8), ('params/b', 2), ('step', 4)]
    """
    depth = fitting_depth(leaves, most)
    sizes: dict[str, list[int]] = {}
    for name, nbytes in leaves.items():
        for above in _prefixes(name, depth) if nbytes else ():
            found = sizes.setdefault(above, [0, 0])
            found[0] += nbytes
            found[1] += 1
    return [Subtree(name, nbytes, count) for name, (nbytes, count) in sizes.items()]


def _prefixes(name: str, depth: int) -> Iterable[str]:
    """The key paths of what the leaf `name` is in, the whole state first, without doubles."""
    return dict.fromkeys(prefix(name, n) for n in range(depth + 1))
