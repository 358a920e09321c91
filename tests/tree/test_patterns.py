"""Patterns: the key path of a node, or a regular expression over whole key paths."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flaxckpt.errors import RuleError
from flaxckpt.tree.keypaths import first_match, pattern_matches, selected

NAMES = ["params/a/kernel", "params/a/bias", "params/ab/kernel", "opt/0/mu/kernel", "step"]

paths = st.lists(st.sampled_from(["a", "b", "a.b", "%30", "0", "axb"]), min_size=1, max_size=3).map(
    "/".join
)
trees = st.lists(paths, max_size=6, unique=True)
regexes = st.lists(st.sampled_from(["a", "b", "/", ".*", "(a|0)", "[ab]", r"\d", "x?"])).map(
    "".join
)


def is_below(name: str, node: str) -> bool:
    """Whether a leaf is a node, or lies below it, key by key."""
    keys, wanted = name.split("/"), node.split("/")
    return keys[: len(wanted)] == wanted


def is_node(node: str, names: list[str]) -> bool:
    return not node.strip("/") or any(is_below(name, node.strip("/")) for name in names)


@given(paths, trees)
@example("a", ["a/b", "ab"])
@example("a.b", ["a/b", "axb", "a.b"])
@example("a.b", ["axb"])
def test_the_path_of_a_node_selects_its_subtree_and_nothing_else(path, names):
    below = {name for name in names if is_below(name, path)}
    matching = {name for name in names if re.fullmatch(path, name)}
    assert selected(path, names) == (below or matching)


@given(regexes.filter(bool), trees)
def test_any_other_pattern_must_match_a_whole_key_path(pattern, names):
    if not is_node(pattern, names):
        expected = {name for name in names if re.fullmatch(pattern, name)}
        assert selected(pattern, names) == expected


@given(st.lists(paths, max_size=4), trees)
def test_a_list_selects_what_any_of_its_patterns_does(patterns, names):
    expected = {name for pattern in patterns for name in selected(pattern, names)}
    assert selected(patterns, names) == selected(tuple(patterns), names) == expected


def test_a_slash_at_either_end_means_the_same():
    assert selected("params/a/", NAMES) == selected("/params/a", NAMES) == set(NAMES[:2])


def test_the_root_is_a_node():
    assert selected("", NAMES) == set(NAMES)


def test_a_function_is_asked_for_each_leaf():
    assert selected(lambda name: name.endswith("kernel"), NAMES) == {*NAMES[::2][:2], NAMES[3]}


@pytest.mark.parametrize(
    ("glob", "regex"),
    [
        ("params/*", "params/.*"),
        ("params/**", "params/.*"),
        ("params/**/kernel", "params/.*/kernel"),
        ("*/kernel", ".*/kernel"),
        ("*", ".*"),
        ("**", ".*"),
        ("st*", "st.*"),
    ],
)
def test_a_glob_is_an_error_that_gives_the_regular_expression(glob, regex):
    for patterns in (glob, ["step", glob]):
        with pytest.raises(RuleError) as raised:
            selected(patterns, NAMES, "missing")
        hint = f"are regular expressions, not globs: use {regex!r}."
        assert str(raised.value).startswith(f"missing: {glob!r} ")
        assert str(raised.value).endswith(hint)
    assert selected(regex, NAMES)


@pytest.mark.parametrize("pattern", [r"a\*", "[ab]*", "(ab)*", "a.*"])
def test_a_regular_expression_with_an_asterisk_is_not_a_glob(pattern):
    assert selected(pattern, ["step"]) == set()


def test_what_is_not_a_regular_expression():
    with pytest.raises(RuleError, match=r"^only: '\(' is not a valid regular expression: missing"):
        selected("(", NAMES)
    assert selected("(", ["(/a", "b"]) == {"(/a"}  # the path of a node is not one, and need not be


def test_what_is_not_a_string():
    with pytest.raises(RuleError, match=r"only: 3 is not a pattern\. Give a string"):
        selected([3], NAMES)


def test_a_pattern_that_selects_nothing_names_the_closest():
    with pytest.raises(RuleError) as raised:
        pattern_matches("params/c/kernel", NAMES, "unexpected", advice="Change it.")
    assert str(raised.value) == (
        "unexpected: 'params/c/kernel' matches no key path as a whole. The closest are "
        "params/a/kernel, params/ab/kernel, opt/0/mu/kernel. Change it."
    )
    assert pattern_matches("params/c/kernel", NAMES, "unexpected", optional=True) == {}


def test_the_first_pattern_that_selects_a_leaf_decides():
    rules = {"params/a": 1, ".*/kernel": 2, ".*": 3}
    assert first_match(rules, NAMES, "specs") == dict(zip(NAMES, (1, 1, 2, 2, 3), strict=True))
    with pytest.raises(RuleError, match="matches no key path"):
        first_match({"b": 1}, NAMES, "missing", optional=False)
