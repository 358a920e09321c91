from __future__ import annotations

from typing import NamedTuple

import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flaxckpt.errors import Mismatch
from flaxckpt.tree.match import MAX_GUESSES, Allowed, SavedSide, TargetSide, match
from flaxckpt.tree.structure import flatten

sides = st.dictionaries(st.sampled_from("abcdef"), st.sampled_from(("f4[2]", "f4[3]", "i4[2]")))


class Typed(NamedTuple):
    spec: str


def compare(saved, target, allowed=Allowed()):
    """Matches trees of types."""
    ours, theirs = flatten(saved), flatten(target)
    return match(
        SavedSide(ours.nodes, dict(zip(ours.names, map(Typed, ours.leaves), strict=True))),
        TargetSide(theirs.nodes, dict(zip(theirs.names, theirs.leaves, strict=True))),
        differ,
        allowed,
    )


def rows_of(saved, target, allowed=Allowed()):
    return compare(saved, target, allowed).mismatches


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
    rows = rows_of(saved, target)
    assert {(m.problem, m.name, m.checkpoint, m.target) for m in rows} == model
    assert len(rows) == len(model)


@given(sides, sides)
def test_rows_are_in_the_order_of_the_target_then_of_the_checkpoint(saved, target):
    order = [*sorted(target), *sorted(name for name in saved if name not in target)]
    positions = [order.index(m.name) for m in rows_of(saved, target)]
    assert positions == sorted(positions)


@given(sides, sides)
def test_only_a_missing_leaf_has_a_guess_and_it_is_an_unexpected_one(saved, target):
    rows = rows_of(saved, target)
    guesses = {f"(did you mean {m.name}?)" for m in rows if m.problem == "unexpected"}
    assert all(m.note in guesses | {""} for m in rows)
    assert all(m.problem == "missing" for m in rows if m.note)


def test_the_same_leaves_match():
    assert rows_of({"a": "int"}, {"a": "int"}) == []


def nested(**leaves):
    """A tree of leaves whose key paths are written with underscores."""
    tree = {}
    for path, leaf in leaves.items():
        *above, last = path.split("__")
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def test_a_renamed_leaf_is_guessed():
    saved, target = nested(params__classifier__kernel="x"), nested(params__head__kernel="x")
    assert rows_of(saved, target)[0].note == "(did you mean params/classifier/kernel?)"


def test_a_leaf_of_the_same_type_is_guessed_before_one_of_a_closer_name():
    saved = nested(layer_10__kernel="f4[2]", layer_1__kernels="f4[3]")
    (row, *_) = rows_of(saved, nested(layer_1__kernel="f4[2]"))
    assert row.note == "(did you mean layer_10/kernel?)"


def test_nothing_is_guessed_when_nothing_is_alike():
    assert rows_of({"zzz": "int"}, nested(params__kernel="int"))[0].note == ""


def test_the_number_of_guesses_is_bounded():
    saved = {"old": {f"kernel_{i}": "x" for i in range(MAX_GUESSES + 5)}}
    target = {"new": {f"kernel_{i}": "x" for i in range(MAX_GUESSES + 5)}}
    assert sum(bool(m.note) for m in rows_of(saved, target)) == MAX_GUESSES


def test_a_leaf_that_may_be_missing_costs_no_guess():
    saved = {"old": {f"kernel_{i}": "x" for i in range(MAX_GUESSES + 5)}}
    target = {"new": {f"kernel_{i}": "x" for i in range(MAX_GUESSES + 5)}}
    allowed = Allowed(missing={f"new/kernel_{i}" for i in range(MAX_GUESSES + 4)})
    (row, *_) = rows_of(saved, target, allowed)
    assert (row.name, bool(row.note)) == (f"new/kernel_{MAX_GUESSES + 4}", True)


@pytest.mark.parametrize(
    ("empty", "shown"),
    [(None, "None (empty)"), ((), "tuple (empty)"), (optax.EmptyState(), "EmptyState (empty)")],
)
def test_an_empty_node_in_the_place_of_a_leaf_is_a_mismatch_whatever_is_allowed(empty, shown):
    allowed = Allowed({"a"}, {"a"})
    rows = rows_of({"a": empty}, {"a": "int"}, allowed)
    assert rows == [Mismatch("empty", "a", shown, "int")]
    rows = rows_of({"a": "int"}, {"a": empty}, allowed)
    assert rows == [Mismatch("empty", "a", "int", shown)]


def test_a_masked_parameter_is_called_that():
    (row,) = rows_of({"a": optax.MaskedNode()}, {"a": "int"})
    assert row.note == "(masked in the checkpoint)"
    (row,) = rows_of({"a": "int"}, {"a": optax.MaskedNode()})
    assert row.note == "(masked in the target)"


@given(sides, sides, st.sets(st.sampled_from("abcdef")), st.sets(st.sampled_from("abcdef")))
def test_what_is_allowed_is_no_mismatch_and_is_told(saved, target, may_miss, may_ignore):
    found = compare(saved, target, Allowed(may_miss, may_ignore))
    assert set(found.initialised) == (target.keys() - saved.keys()) & may_miss
    assert set(found.ignored) == (saved.keys() - target.keys()) & may_ignore
    assert found.saved == {name: name for name in flatten(target).names if name in saved}
    strict = {m.name for m in rows_of(saved, target)}
    named = {m.name for m in found.mismatches}
    assert named | set(found.initialised) | set(found.ignored) == strict
    assert not named & {*found.initialised, *found.ignored}


@given(sides, sides, st.sets(st.sampled_from("abcdef")))
def test_a_leaf_that_is_given_needs_no_partner(saved, target, given):
    found = compare(saved, target, Allowed(given=given & target.keys()))
    assert set(found.initialised) == given & target.keys()
    strict = {m.name for m in rows_of(saved, target)}
    assert {m.name for m in found.mismatches} == strict - (given & target.keys())


def adam(**leaves):
    return {"opt_state": ({"count": "i4[]", "mu": leaves, "nu": leaves}, ()), "w": "f4[2]"}


@given(st.booleans(), st.booleans())
def test_optimizers_are_reset_on_both_sides(has_saved, has_target):
    saved = adam(w="f4[2]") if has_saved else {"w": "f4[2]"}
    target = adam(b="f4[3]") if has_target else {"w": "f4[2]"}
    found = compare(saved, target, Allowed(resets_optimizers=True))
    assert (found.saved, found.mismatches) == ({"w": "w"}, [])
    assert list(found.initialised) == [n for n in flatten(target).names if n != "w"]
    assert list(found.ignored) == [n for n in flatten(saved).names if n != "w"]


def test_a_pair_of_two_names_is_compared_and_shows_both():
    assert rows_of({"l": {"0": "f4[2]"}}, {"l": ["f4[2]"]}) == []
    (row,) = rows_of({"l": {"0": "f4[2]"}}, {"l": ["f4[3]"]})
    assert row == Mismatch("shape", "l/0", "f4[2]", "f4[3]", "(saved as l/%30)")


def test_candidates_are_listed_and_not_unexpected_themselves():
    def state(trace):
        return optax.TraceState(trace)

    saved = {"opt_state": (state("f4[2]"), state("f4[2]"))}
    target = {"opt_state": ((), (), state("f4[2]"))}
    rows = rows_of(saved, target)
    note = "(may be opt_state/0/trace or opt_state/1/trace)"
    assert rows == [Mismatch("ambiguous", "opt_state/2/trace", "-", "f4[2]", note)]


def test_a_type_that_is_not_needed_is_not_computed():
    class Costly:
        @property
        def spec(self):
            raise AssertionError("computed")

    ours, theirs = flatten({"a": 0, "b": 0}), flatten({"b": 0})
    saved = SavedSide(ours.nodes, {"a": Costly(), "b": Typed("x")})
    found = match(saved, TargetSide(theirs.nodes, {"b": "x"}), differ, Allowed(unexpected={"a"}))
    assert found.ignored == ["a"]
