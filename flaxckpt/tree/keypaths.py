"""Key paths: how a leaf is named, and which leaves a pattern selects."""

from __future__ import annotations

import base64
import difflib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import unquote

import orjson

from flaxckpt.errors import RuleError, UnsupportedKeyError

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
T = TypeVar("T")


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


# Patterns: one language for every argument, rule and command that selects leaves by key path.
#
# 1. The key path of a node selects the leaves of its subtree. A leaf is a node, too.
# 2. Any other pattern is a regular expression that must match a whole key path (`re.fullmatch`).


Only = str | Sequence[str] | Callable[[str], bool]

# An asterisk that repeats no group, set, dot or escaped letter: a glob writes it so.
_GLOB = re.compile(r"(?<![.)\]}])(?<!\\.)\*+")


def pattern_matches(
    pattern: str,
    names: Collection[str],
    where: str,
    *,
    optional: bool = False,
    advice: str = "Fix the pattern.",
) -> dict[str, re.Match[str]]:
    """The leaves that `pattern` selects, each with its match, which ends at the node of rule 1.

    Args:
      pattern: the key path of a node, or a regular expression.
      names: the key paths of all leaves.
      where: the argument or rule that has the pattern, for errors.
      optional: whether the pattern may select nothing. A glob that would select leaves may not.
      advice: what to do about a pattern that selects nothing.

    Raises:
      RuleError: when the pattern is not a valid regular expression, or selects nothing.

    Example:
      >>> names = ["params/a/kernel", "params/b/kernel", "step"]
      >>> list(pattern_matches("params/a", names, "only"))
      ['params/a/kernel']
      >>> list(pattern_matches("params/.*/kernel", names, "only"))
      ['params/a/kernel', 'params/b/kernel']
    """
    if not isinstance(pattern, str):
        raise RuleError(f"{where}: {pattern!r} is not a pattern. Give a string.")
    root = pattern.strip("/")
    if below := [n for n in names if not root or n == root or n.startswith(f"{root}/")]:
        node = re.compile(re.escape(root))
        return {name: match for name in below if (match := node.match(name))}
    glob = _GLOB.sub(".*", pattern)
    use = f"Patterns are regular expressions, not globs: use {glob!r}."
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise RuleError(
            f"{where}: {pattern!r} is not a valid regular expression: {error}. "
            f"{use if glob != pattern else 'Fix the pattern.'}"
        ) from None
    found = {name: match for name in names if (match := compiled.fullmatch(name))}
    is_glob = glob != pattern and not found and any(re.fullmatch(glob, name) for name in names)
    if is_glob or not (found or optional):
        close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or list(names)[:3]
        closest = f"The closest are {', '.join(close) or 'none, because there are no leaves'}. "
        hint = use if is_glob else closest + advice
        raise RuleError(f"{where}: {pattern!r} matches no key path as a whole. {hint}")
    return found


def selected(only: Only, names: Collection[str], where: str = "only") -> set[str]:
    """The leaves that `only` selects: a pattern, a list of patterns, or a function of the name.

    Raises:
      RuleError: when a pattern is not a valid regular expression, or is a glob.

    Example:
      >>> sorted(selected(["params", ".*ep"], ["params/a", "params/b", "step", "rng"]))
      ['params/a', 'params/b', 'step']
    """
    if callable(only):
        return {name for name in names if only(name)}
    patterns = [only] if isinstance(only, str) else only
    found = (pattern_matches(pattern, names, where, optional=True) for pattern in patterns)
    return {name for matches in found for name in matches}


def first_match(
    rules: Mapping[str, T], names: Collection[str], where: str, *, optional: bool = True
) -> dict[str, T]:
    """The value of the first pattern in `rules` that selects a leaf, by leaf.

    Raises:
      RuleError: when a pattern is not a valid regular expression, or is a glob, or selects nothing
        and is not `optional`.

    Example:
      >>> first_match({"params": "bfloat16", ".*": "float32"}, ["params/w", "step"], "save_dtype")
      {'params/w': 'bfloat16', 'step': 'float32'}
    """
    found: dict[str, T] = {}
    for pattern, value in rules.items():
        for name in pattern_matches(pattern, names, where, optional=optional):
            found.setdefault(name, value)
    return found
