from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flaxckpt.tree.keypaths import selector, subtree_of

names = st.text("ab./%\n", max_size=8)
globs = st.lists(st.sampled_from(["a", "b", ".", "/", "*", "**", "**/", "?", "%", "\n"])).map(
    "".join
)
paths = st.lists(st.sampled_from(["a", "b", "a.b", "%30", "0"]), min_size=1, max_size=3).map(
    "/".join
)


def model(glob: str, name: str) -> bool:
    """Matches a glob letter by letter."""
    if not glob:
        return not name
    if glob.startswith("**/"):
        starts = [0, *(i + 1 for i, letter in enumerate(name) if letter == "/")]
        return any(model(glob[3:], name[start:]) for start in starts)
    if glob.startswith("**"):
        return any(model(glob[2:], name[i:]) for i in range(len(name) + 1))
    if glob[0] == "*":
        return any(model(glob[1:], name[i:]) for i in range(len(name.partition("/")[0]) + 1))
    letter = bool(name) and (name[0] == glob[0] or (glob[0] == "?" and name[0] != "/"))
    return letter and model(glob[1:], name[1:])


@given(globs.filter(lambda glob: "*" in glob or "?" in glob), names)
@example("**/kernel", "kernel")
@example("**/kernel", "akernel")
@example("a/**/b", "a/b")
@example("a**", "a\n/b")
@example("?", "/")
@example("*", "")
@example("a.*", "axb")
def test_a_glob_matches_what_the_model_matches(glob, name):
    assert selector(glob)(name) == model(glob, name)


@given(paths, paths)
@example("a", "a/b")
@example("a", "ab")
@example("a.b", "a/b")
@example("a.b", "axb")
def test_a_path_selects_the_leaf_and_what_lies_below_it(path, name):
    keys, wanted = name.split("/"), path.split("/")
    assert selector(path)(name) == (keys[: len(wanted)] == wanted)


@given(st.lists(globs.filter(bool) | paths, max_size=4), names)
def test_a_list_selects_what_any_of_its_strings_does(strings, name):
    assert selector(strings)(name) == any(selector(string)(name) for string in strings)


@pytest.mark.parametrize("sequence", [list, tuple])
def test_a_list_mixes_paths_and_globs(sequence):
    wanted = selector(sequence(["params", "**/mu/*", "step"]))
    selected = [
        name
        for name in ("params", "params/a/b", "paramsx", "opt/0/mu/w", "opt/0/mu/w/x", "step", "s")
        if wanted(name)
    ]
    assert selected == ["params", "params/a/b", "opt/0/mu/w", "step"]


def test_an_empty_list_selects_no_leaf():
    assert not any(map(selector([]), ["a", "a/b"]))


def test_a_predicate_is_asked():
    asked = []

    def wanted(name):
        asked.append(name)
        return name == "b"

    assert [selector(wanted)(name) for name in "ab"] == [False, True]
    assert asked == ["a", "b"]


@pytest.mark.parametrize("only", ["params", "a/b.c", "%30/[0]", "", "a{b}"])
def test_a_string_without_a_wildcard_names_a_subtree(only):
    assert subtree_of(only) == only


@pytest.mark.parametrize("only", [None, "a/*", "a?", "**", ["a"], ("a",), [], str.isidentifier])
def test_nothing_else_does(only):
    assert subtree_of(only) is None
