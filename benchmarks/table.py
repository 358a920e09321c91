"""Rows of numbers of two sides, their ratio and its target, as Markdown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Target:
    """What a row is to reach.

    Attributes:
      limit: the number that it is compared with.
      of: whether the `ratio` of the two sides is compared, or our own `value`.
      at_least: whether the limit is to be reached, rather than not to be passed.
    """

    limit: float
    of: Literal["ratio", "value"] = "ratio"
    at_least: bool = False

    def met(self, row: Row) -> bool:
        """Whether `row` reaches it."""
        found = row.ratio if self.of == "ratio" else row.ours
        return found >= self.limit if self.at_least else found <= self.limit

    def __str__(self) -> str:
        return f"{self.of} {'≥' if self.at_least else '≤'} {number(self.limit)}"


@dataclass(frozen=True)
class Row:
    """One measurement of both sides.

    Attributes:
      what: was measured, with its unit.
      ours: the number of the first side.
      other: the number of the side it is compared with.
      target: what it is to reach, when anything was promised.
    """

    what: str
    ours: float
    other: float
    target: Target | None = None

    @property
    def ratio(self) -> float:
        """The first side over the second."""
        return self.ours / self.other

    def cells(self) -> list[str]:
        """The texts of its columns."""
        numbers = [number(self.ours), number(self.other), number(self.ratio)]
        if self.target is None:
            return [self.what, *numbers, "", ""]
        return [self.what, *numbers, str(self.target), "yes" if self.target.met(self) else "**no**"]


@dataclass(frozen=True)
class Table:
    """Rows with a title, a note, and the names of the two sides."""

    title: str
    rows: list[Row]
    note: str = ""
    sides: tuple[str, str] = ("flaxckpt", "Orbax")

    def markdown(self) -> str:
        """The table below its title and note."""
        head = ["", *self.sides, "ratio", "target", "met"]
        lines = [head, ["---", *["---:"] * 3, "---", "---"], *(row.cells() for row in self.rows)]
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join(filter(None, [f"## {self.title}", self.note, body]))


def number(value: float) -> str:
    """Three digits, or all of an integer part that has more; all of an int."""
    if isinstance(value, int):
        return f"{value:,}"
    digits = sum(abs(value) < power for power in (100, 10, 1))
    return f"{value:,.{digits}f}"
