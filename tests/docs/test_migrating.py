"""Every row of docs/migrating.md does what it says, on both sides."""

import re
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs.migrating_rows import ROWS, Names, Shared

# The other libraries warn; the code on the right, alone, must not.
pytestmark = pytest.mark.filterwarnings("ignore")

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"
CELL = re.compile(r"`[^`]+`(<br>`[^`]+`)*")
NOT_RUN = ("T5X", "before")


class Row(NamedTuple):
    """One row of a table of the page."""

    library: str
    title: str
    before: str
    after: str


def rows_of(text):
    """The rows of all tables below the headings that name libraries."""
    library = ""
    for line in text.splitlines():
        if line.startswith("## "):
            library = line.removeprefix("## ")
        if line.startswith("| ") and line != "| what | before | after |":
            yield Row(library, *(cell.strip() for cell in line.strip("|").split("|")))


FOUND = list(rows_of(PAGE.read_text()))
SIDES = [
    pytest.param(row, side, id=f"{row.library}: {row.title}: {side}")
    for row in FOUND
    for side in ("before", "after")
    if (row.library, side) != NOT_RUN
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return Shared(tmp_path_factory.mktemp("shared"))


def test_each_row_has_a_check_and_each_check_a_row():
    titles = [(row.library, row.title) for row in FOUND]
    assert len(titles) == len(set(titles))
    assert set(titles) == set(ROWS)


def test_cells_are_code():
    for row in FOUND:
        for code in (row.before, row.after):
            assert CELL.fullmatch(code), code
            compile(source(code), row.title, "exec")


@pytest.mark.parametrize(("row", "side"), SIDES)
def test_row(row, side, tmp_path, shared):
    code = compile(source(getattr(row, side)), f"{row.title}, {side}", "exec")
    names = Names(tmp_path, side, shared)
    runs = []
    for _ in ROWS[row.library, row.title](names):
        with warnings.catch_warnings():
            warnings.simplefilter("error" if side == "after" else "ignore")
            runs.append(exec(code, vars(names)))
    assert runs


def source(cell):
    """The code of a cell."""
    return "\n".join(re.findall("`([^`]+)`", cell))
