"""The code in the pages for people, and what is to be done with it.

A page has fenced blocks. Those in Python are run, in order and in one namespace. What a page needs
and nobody wants to read is in comments: `<!-- setup: ... -->` is run before the blocks below it,
`<!-- check: ... -->` likewise, and `<!-- not run: reason -->` goes before a block that cannot be
run. A Python block with a title (`title="train.py"`) is a file. In a `console` block each line that
begins with `$` is a command, and what follows is what it prints: numbers may differ.
"""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
# The rows of migrating.md have a test of their own.
PAGES = [
    ROOT / "README.md",
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if p.name != "migrating.md"),
]

_PART = re.compile(
    r"^<!-- (?P<hidden>setup|check|not run):(?P<text>.*?)-->$"
    r"|^```(?P<language>\w*) *(?P<options>[^\n]*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_TITLE = re.compile(r'title="([^"]+)"')


class Block(NamedTuple):
    """Something on a page that is run, or said to be not.

    Attributes:
      language: of the block; `python` for what is hidden.
      code: what it holds.
      line: where that begins on the page.
      title: the name of the file that it is, if it is one.
      not_run: why it is not run; empty when it is.
      is_hidden: whether nobody sees it.
    """

    language: str
    code: str
    line: int
    title: str = ""
    not_run: str = ""
    is_hidden: bool = False


def blocks_of(text: str) -> list[Block]:
    """The blocks of a page, in order."""
    found, reason = [], ""
    for part in _PART.finditer(text):
        if part["hidden"] == "not run":
            reason = part["text"].strip()
        elif part["hidden"]:
            line = text.count("\n", 0, part.start("text")) + 1
            found.append(Block("python", part["text"].lstrip(" "), line, is_hidden=True))
        else:
            line = text.count("\n", 0, part.start("code")) + 1
            title = _TITLE.search(part["options"])
            name = title[1] if title else ""
            found.append(Block(part["language"], part["code"], line, name, reason))
            reason = ""
    return found


def commands_of(code: str) -> list[tuple[str, str]]:
    """The commands of a console block, each with what it prints."""
    parts = re.split(r"^\$ ", code, flags=re.MULTILINE)[1:]
    joined = (part.replace("\\\n", " ") for part in parts)
    return [(command, printed) for command, _, printed in (p.partition("\n") for p in joined)]
