"""Which leaves are wanted, by their key paths. Pure decisions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

Only = str | Sequence[str] | Callable[[str], bool]

_WILDCARD = re.compile(r"[*?]")
_TOKEN = re.compile(r"(\*\*/|\*\*|\*|\?)")
_MEANING = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


def subtree_of(only: Only | None) -> str | None:
    """The key path of the one subtree that `only` names; `None` when it selects in another way.

    Example:
      >>> subtree_of("params/dense"), subtree_of("params/**"), subtree_of(["params"])
      ('params/dense', None, None)
    """
    return only if isinstance(only, str) and not _WILDCARD.search(only) else None


def selector(only: Only) -> Callable[[str], bool]:
    """Whether a leaf is selected, by its key path.

    A string is a glob over key paths (`*` and `?` stay within one key, `**` does not) or, without
    a wildcard, the path of a node, of which all leaves are selected. A list selects what any of
    its strings does.

    Example:
      >>> wanted = selector(["params/**/kernel", "step"])
      >>> [wanted(name) for name in ("params/a/b/kernel", "params/kernel", "params/bias", "step")]
      [True, True, False, True]
    """
    if callable(only):
        return only
    globs = [only] if isinstance(only, str) else only
    patterns = [re.compile(_regex(glob), re.DOTALL) for glob in globs]
    return lambda name: any(pattern.fullmatch(name) for pattern in patterns)


def _regex(glob: str) -> str:
    """A glob, or the path of a node, as a regular expression."""
    if not _WILDCARD.search(glob):
        return rf"{re.escape(glob.strip('/'))}(?:/.*)?"
    return "".join(_MEANING.get(part) or re.escape(part) for part in _TOKEN.split(glob))
