from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flaxckpt.tree.match import MAX_GUESSES, match

sides = st.dictionaries(st.sampled_from("abcdef"), st.sampled_from(("f4[2]", "f4[3]", "i4[2]")))


def differ(saved: str, target: str) -> str:
    """A problem of two specs, as text."""
    if saved[:2] != target[:2]:
        return "dtype"
    return "" if saved == target else "shape"


@given(sides, sides)
def test_exactly_the_leaves_that_differ_are_listed(saved, target):
    model = set()
    for name in "abcdef":
        a, b = saved.get(name), target.get(name)
        if a == b:
            continue
        problem = "missing" if a is None else "unexpected" if b is None else differ(a, b)
        model.add((problem, name, a or "-", b or "-"))
    rows = match(saved, target, differ)
    assert {(m.problem, m.name, m.checkpoint, m.target) for m in rows} == model
    assert len(rows) == len(model)


@given(sides, sides)
def test_rows_are_in_the_order_of_the_target_then_of_the_checkpoint(saved, target):
    order = [*target, *(name for name in saved if name not in target)]
    positions = [order.index(m.name) for m in match(saved, target, differ)]
    assert positions == sorted(positions)


@given(sides, sides)
def test_only_a_missing_leaf_has_a_guess_and_it_is_an_unexpected_one(saved, target):
    rows = match(saved, target, differ)
    guesses = {f"(did you mean {m.name}?)" for m in rows if m.problem == "unexpected"}
    assert all(m.note in guesses | {""} for m in rows)
    assert all(m.problem == "missing" for m in rows if m.note)


def test_the_same_leaves_match():
    assert match({"a": "int"}, {"a": "int"}, differ) == []


def test_a_renamed_leaf_is_guessed():
    saved, target = {"params/classifier/kernel": "x"}, {"params/head/kernel": "x"}
    assert match(saved, target, differ)[0].note == "(did you mean params/classifier/kernel?)"


def test_a_leaf_of_the_same_type_is_guessed_before_one_of_a_closer_name():
    saved = {"layer_10/kernel": "f4[2]", "layer_1/kernels": "f4[3]"}
    (row, *_) = match(saved, {"layer_1/kernel": "f4[2]"}, differ)
    assert row.note == "(did you mean layer_10/kernel?)"


def test_nothing_is_guessed_when_nothing_is_alike():
    assert match({"zzz": "int"}, {"params/kernel": "int"}, differ)[0].note == ""


def test_the_number_of_guesses_is_bounded():
    saved = {f"old/kernel_{i}": "x" for i in range(MAX_GUESSES + 5)}
    target = {f"new/kernel_{i}": "x" for i in range(MAX_GUESSES + 5)}
    assert sum(bool(m.note) for m in match(saved, target, differ)) == MAX_GUESSES


def test_an_empty_node_of_the_checkpoint_is_shown_where_a_leaf_is_missing():
    rows = match({}, {"a": "int"}, differ, saved_empties={"a": "None (empty)"})
    assert rows[0].checkpoint == "None (empty)"


def test_an_empty_node_of_the_target_is_shown_where_a_leaf_is_unexpected():
    rows = match({"a": "int"}, {}, differ, target_empties={"a": "EmptyState (empty)"})
    assert rows[0].target == "EmptyState (empty)"
