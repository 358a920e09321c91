"""Key paths: how a leaf is named, and which leaves a pattern selects."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

import orjson

from flaxckpt.errors import UnsupportedKeyError

# Key paths of leaves, their collision-free names, and the way back.
#
# A name is the keys of a path joined by `/`. The kind of a key (attribute, dict key, index) is not
# part of the name, so that a NamedTuple, a dataclass and the dict that nnx makes of it agree:
# `opt_state/0/mu/kernel` names a moment in all of them. Everything else about a key is kept: `%` is
# the escape character, and an integer never looks like a string.
#
#     str             itself, with % and / as %25 and %2F     kernel    a%2Fb
#     str of digits   its first character escaped             '0' -> %30
#     ''              %
#     int             decimal                                 0    -7
#     anything else   %! and its JSON                         %!{"bool":true}


Kind = Literal["attr", "dict", "seq"]


class Key(NamedTuple):
    """One step of a key path."""

    kind: Kind
    value: Any


KeyPath = tuple[Key, ...]

_DIGITS = re.compile(r"-?[0-9]+")
_INT64 = range(-(1 << 63), 1 << 63)


def name_of(values: tuple[Any, ...]) -> str:
    """The name of the leaf at the keys `values` (without their kinds); `''` is the root.

    Raises:
      UnsupportedKeyError: when a key has no written form.

    Example:
      >>> name_of(("opt_state", 0, "a/b", "0"))
      'opt_state/0/a%2Fb/%30'
    """
    return "/".join(map(component, values))


def child_name(parent: str, value: Any) -> str:
    """The name of the child at the key `value` of the node `parent`; only the root has none.

    Example:
      >>> child_name(child_name("", "opt_state"), 0)
      'opt_state/0'
    """
    try:
        inner = component(value)
    except UnsupportedKeyError as error:
        raise UnsupportedKeyError(f"in {parent or 'the root'}: {error}") from None
    return f"{parent}/{inner}" if parent else inner


def component(value: Any) -> str:
    """One key as a component of a name."""
    if type(value) is str and value.isidentifier():
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(int(value))
    if not isinstance(value, str):
        return "%!" + _escape(orjson.dumps(encode_key(value)).decode())
    if not value:
        return "%"
    if _DIGITS.fullmatch(value):
        return f"%{ord(value[0]):02X}{value[1:]}"
    return _escape(encode_key(value))


def parse_name(name: str) -> tuple[Any, ...]:
    """The keys that `name_of` made `name` from.

    Example:
      >>> parse_name("opt_state/0/a%2Fb/%30")
      ('opt_state', 0, 'a/b', '0')
    """
    return tuple(map(_parse_component, name.split("/"))) if name else ()


def _parse_component(text: str) -> Any:
    """The key that `component` wrote as `text`."""
    if text.startswith("%!"):
        return decode_key(orjson.loads(unquote(text[2:])))
    if text == "%":
        return ""
    return int(text) if _DIGITS.fullmatch(text) else unquote(text)


def _escape(text: str) -> str:
    """`text` without `/`, with `%` only as the start of an escape."""
    return text.replace("%", "%25").replace("/", "%2F")


def encode_key(value: Any) -> Any:
    """A dict key as JSON: `str` and `int` as they are, other types as `{type: value}`.

    Raises:
      UnsupportedKeyError: for a type that has no written form here, or a string that is not
        valid unicode.
    """
    match value:
        case str():
            return _valid_unicode(value)
        case bool():
            return {"bool": value}
        case int():
            return int(value) if int(value) in _INT64 else {"int": str(int(value))}
        case float():
            return {"float": value.hex()}
        case bytes():
            return {"bytes": base64.b64encode(value).decode()}
        case None:
            return {"none": 0}
        case tuple():
            return {"tuple": [encode_key(v) for v in value]}
    raise UnsupportedKeyError(
        f"a dict key of type {type(value).__name__} cannot be saved: {value!r}. Use str, int, "
        "bool, float, bytes, None or tuples of these as keys."
    )


def decode_key(data: Any) -> Any:
    """The dict key that `encode_key` wrote as `data`.

    Raises:
      ValueError: when `data` is not what `encode_key` writes.
    """
    if isinstance(data, str | int) and not isinstance(data, bool):
        return data
    match data:
        case {"bool": bool(v)}:
            return v
        case {"int": str(v)}:
            return int(v)
        case {"float": str(v)}:
            return float.fromhex(v)
        case {"bytes": str(v)}:
            return base64.b64decode(v, validate=True)
        case {"none": 0}:
            return None
        case {"tuple": list(v)}:
            return tuple(map(decode_key, v))
    raise ValueError(f"not a key: {data!r}")


def _valid_unicode(text: str) -> str:
    """`text` as an exact `str`, refused when it holds half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UnsupportedKeyError(
            f"the dict key {text!r} is not valid unicode and cannot be saved. Rename the key."
        ) from None
    return str(text)


# Which leaves are wanted, by their key paths. Pure decisions.


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
