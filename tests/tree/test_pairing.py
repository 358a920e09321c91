from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flaxckpt.tree import nnx_objects
from flaxckpt.tree.match import known_by, pair, place_of, places_of
from flaxckpt.tree.structure import flatten

PARAMS = {"b": np.zeros(1), "w": np.ones(2)}


class Point(NamedTuple):
    x: Any
    y: Any


def pairs_of(saved, target):
    """How the leaves of two trees are paired."""
    flats = [flatten(nnx_objects.split(tree)[0]) for tree in (saved, target)]
    found = [
        places_of(flat.nodes, known_by(other.nodes))
        for flat, other in zip(flats, reversed(flats), strict=True)
    ]
    leaves = [
        {name: where[name] for name in flat.names} for flat, where in zip(flats, found, strict=True)
    ]
    return pair(*leaves)


def saved_of(saved, target):
    """The saved leaf of each leaf of the target, where nothing is doubtful."""
    pairs = pairs_of(saved, target)
    assert pairs.candidates == {}
    return pairs.saved


def names_of(tree):
    return flatten(tree).names


def moved(tree, before, after):
    """The pairs of a subtree that moved."""
    return {
        after + name.removeprefix(before): name
        for name in names_of(tree)
        if name.startswith(before)
    }


# The same names


def test_equal_names_belong_together_whatever_the_containers():
    assert saved_of({"a": [1, {"x": 2}]}, {"a": (1, {"x": 2})}) == {"a/0": "a/0", "a/1/x": "a/1/x"}
    assert saved_of(Point(1, 2), {"x": 1, "y": 2}) == {"x": "x", "y": "y"}


def test_other_names_do_not():
    assert saved_of({"a": 1, "b": {"c": 2}}, {"b": 1, "c": 2}) == {}


def test_an_equal_name_wins_over_another_spelling():
    assert saved_of({0: 1}, {0: 1}) == {"0": "0"}
    both = {"a": {"b": 1}, "a.b": 2}
    assert saved_of(both, both) == {"a/b": "a/b", "a.b": "a.b"}


# Other spellings


@pytest.mark.parametrize(("saved", "target"), [("0", 0), (0, "0"), ("-7", -7)])
def test_digits_and_numbers(saved, target):
    (name,), (wanted,) = names_of({"a": {saved: 1}}), names_of({"a": {target: 1}})
    assert name != wanted
    assert saved_of({"a": {saved: 1}}, {"a": {target: 1}}) == {wanted: name}


def test_digits_and_indices():
    assert saved_of({"0": 1, "1": 2}, [1, 2]) == {"0": "%30", "1": "%31"}


@pytest.mark.parametrize("box", ["value", "raw_value"])
def test_boxes_that_were_saved_as_dicts(box):
    plain, boxed = {"a": {"kernel": 1}}, {"a": {"kernel": {box: 1}}}
    assert saved_of(boxed, plain) == {"a/kernel": f"a/kernel/{box}"}
    assert saved_of(plain, boxed) == {f"a/kernel/{box}": "a/kernel"}


def test_boxes_of_flax_leave_no_trace():
    boxed = {"k": nn.Partitioned(1, names=("a",)), "v": nnx.Param(jnp.ones(1))}
    assert saved_of({"k": 1, "v": {"value": 2}}, boxed) == {"k": "k", "v": "v/value"}


def test_a_leaf_that_is_called_value_by_itself():
    assert saved_of({"value": 1}, {"raw_value": 1}) == {}
    assert saved_of({"value": 1}, {"value": 1}) == {"value": "value"}


def test_dotted_names():
    assert saved_of({"a.b.c": 1}, {"a": {"b": {"c": 1}}}) == {"a/b/c": "a.b.c"}
    assert saved_of({"a": {"b": {"c": 1}}}, {"a": {"b.c": 1}}) == {"a/b.c": "a/b/c"}


def test_two_of_one_spelling_are_not_guessed():
    assert saved_of({"a": {"0": 1}, "a.0": 2}, {"a": [3]}) == {}
    assert saved_of({"a": [3]}, {"a": {"0": 1}, "a.0": 2}) == {}


def test_namedtuples_by_index():
    for indexed in ([1, 2], {"0": 1, "1": 2}, {0: 1, 1: 2}):
        first, second = names_of({"p": indexed})
        assert saved_of({"p": indexed}, {"p": Point(1, 2)}) == {"p/x": first, "p/y": second}
        assert saved_of({"p": Point(1, 2)}, {"p": indexed}) == {first: "p/x", second: "p/y"}


def test_a_leaf_of_which_only_the_name_is_known():
    assert place_of("a/%30/value").spelling == "a.0"
    assert place_of("").spelling == ""


# Optimizers


def state(tx, params=PARAMS):
    return {"opt": tx.init(params), "params": params}


def finite(tx):
    return optax.apply_if_finite(tx, 3)


def halves(tx):
    return optax.multi_transform({"a": tx, "s": optax.sgd(0.1, momentum=0.9)}, {"b": "s", "w": "a"})


CLIP = optax.clip(1.0)
ADAM, ADAMW = optax.adam(1e-3), optax.adamw(1e-3)
SCHEDULE = optax.scale_by_schedule(lambda count: 1.0)
# Optimizers, and where the state of the second lies in that of the first.
WRAPPED = [
    (optax.chain(CLIP, ADAM), ADAM, "1/"),
    (optax.chain(CLIP, ADAMW), ADAMW, "1/"),
    (optax.chain(ADAM, CLIP), ADAM, "0/"),
    (optax.chain(CLIP, optax.chain(CLIP, ADAM)), ADAM, "1/1/"),
    (optax.masked(ADAM, {"b": True, "w": True}), ADAM, "inner_state/"),
    (optax.MultiSteps(ADAMW, 2), ADAMW, "inner_opt_state/"),
    (finite(ADAM), ADAM, "inner_state/"),
    (optax.MultiSteps(optax.chain(CLIP, ADAM), 2), ADAM, "inner_opt_state/1/"),
    (optax.chain(CLIP, halves(ADAM)), halves(ADAM), "1/"),
    (optax.MultiSteps(halves(ADAM), 2), halves(ADAM), "inner_opt_state/"),
    (optax.chain(CLIP, finite(ADAM)), finite(ADAM), "1/"),
    (
        optax.chain(CLIP, optax.inject_hyperparams(optax.adam)(0.1)),
        optax.inject_hyperparams(optax.adam)(0.1),
        "1/",
    ),
]


@pytest.mark.parametrize(("outer", "inner", "where"), WRAPPED)
def test_the_state_of_an_optimizer_is_found_where_it_has_moved(outer, inner, where):
    wrapped, plain = state(outer), state(inner)
    params = {name: name for name in names_of(plain) if name.startswith("params/")}
    expected = moved(plain, "opt/", f"opt/{where}")
    assert saved_of(plain, wrapped) == expected | params
    assert saved_of(wrapped, plain) == {v: k for k, v in expected.items()} | params


def test_every_state_of_a_chain_is_found_though_another_one_has_its_name():
    before = state(optax.chain(optax.scale_by_adam(), SCHEDULE))
    after = state(optax.chain(CLIP, optax.scale_by_adam(), SCHEDULE))
    found = saved_of(before, after)
    assert found["opt/1/count"] == "opt/0/count"
    assert found["opt/2/count"] == "opt/1/count"
    assert found["opt/1/mu/w"] == "opt/0/mu/w"
    assert set(found.values()) == set(names_of(before))
    back = saved_of(after, before)
    assert back == {saved: name for name, saved in found.items()}


def test_the_count_of_another_state_is_not_taken_for_a_missing_one():
    """Saved without a schedule, whose count has the name of Adam's."""
    before = state(optax.chain(CLIP, optax.scale_by_adam()))
    after = state(optax.chain(optax.scale_by_adam(), SCHEDULE))
    found = saved_of(before, after)
    assert found["opt/0/count"] == "opt/1/count"
    assert "opt/1/count" not in found


def test_a_state_of_another_class_is_never_taken():
    found = saved_of(state(optax.trace(0.9)), state(optax.scale_by_adam()))
    assert found == {"params/b": "params/b", "params/w": "params/w"}
    rms, adam = optax.scale_by_rms(), optax.scale_by_adam()
    assert not any(name.startswith("opt/") for name in saved_of(state(rms), state(adam)))


def test_what_a_mask_leaves_out_has_no_leaf():
    some = state(optax.masked(ADAM, {"b": False, "w": True}))
    found = saved_of(state(ADAM), some)
    assert found["opt/inner_state/0/mu/w"] == "opt/0/mu/w"
    assert not any(name.endswith("/b") for name in found if name.startswith("opt/"))


def test_two_equal_states_that_move_are_doubtful():
    before = state(optax.chain(ADAM, CLIP, ADAM))
    after = state(optax.chain(CLIP, ADAM, ADAM, CLIP))
    pairs = pairs_of(before, after)
    assert pairs.candidates["opt/1/0/mu/w"] == ["opt/0/0/mu/w"]
    assert not any(name in pairs.saved for name in pairs.candidates)
    both = state(optax.chain(CLIP, CLIP, CLIP, ADAM, ADAM))
    pairs = pairs_of(before, both)
    for name in ("count", "mu/b", "mu/w", "nu/b", "nu/w"):
        for position in (3, 4):
            candidates = pairs.candidates[f"opt/{position}/0/{name}"]
            assert candidates == [f"opt/0/0/{name}", f"opt/2/0/{name}"]
    assert pairs.saved == {"params/b": "params/b", "params/w": "params/w"}


def test_one_state_for_two_is_doubtful():
    pairs = pairs_of(state(ADAM), state(optax.chain(CLIP, ADAM, ADAM)))
    assert pairs.candidates["opt/1/0/count"] == pairs.candidates["opt/2/0/count"] == ["opt/0/count"]


def test_two_models_keep_their_own_states():
    """Generator and discriminator have parameters of one name and optimizers of one kind."""
    models = ("disc", "gen")
    before = {name: state(ADAM) for name in models}
    after = {name: state(optax.chain(CLIP, ADAM)) for name in models}
    found = saved_of(before, after)
    assert len(found) == len(names_of(before))
    assert all(saved.split("/")[0] == name.split("/")[0] for name, saved in found.items())
    assert found["gen/opt/1/0/mu/w"] == "gen/opt/0/mu/w"


def test_a_state_does_not_move_from_one_model_to_another():
    adam, sgd = state(ADAM), state(optax.sgd(0.1, momentum=0.9))
    found = saved_of({"disc": sgd, "gen": adam}, {"disc": adam, "gen": sgd})
    assert all(name == saved for name, saved in found.items())
    assert all("params" in name for name in found)


def test_a_tuple_of_models_is_no_chain():
    adam, sgd = (PARAMS, ADAM.init(PARAMS)), (PARAMS, optax.sgd(0.1, momentum=0.9).init(PARAMS))
    found = saved_of((adam, sgd), (sgd, adam))
    assert all(name == saved for name, saved in found.items())


def test_a_tuple_of_parameters_and_a_state():
    found = saved_of((PARAMS, ADAM.init(PARAMS)), (PARAMS, optax.chain(CLIP, ADAM).init(PARAMS)))
    assert found["1/1/0/mu/w"] == "1/0/mu/w"
    assert len(found) == 7


def test_a_dict_that_has_the_fields_of_a_state_is_not_one_where_states_have_classes():
    tx = optax.chain(optax.scale_by_adam(), SCHEDULE)
    before = {"opt": tx.init(PARAMS), "seen": [{"count": 1}]}
    after = {"opt": tx.init(PARAMS), "seen": [{"other": 1}, {"count": 2}]}
    assert "seen/1/count" not in saved_of(before, after)


def test_states_that_were_saved_as_dicts():
    """As by nnx, and by what knows no NamedTuples."""
    plain = {"opt": [{"count": 0, "mu": PARAMS, "nu": PARAMS}, {}], "params": PARAMS}
    target = state(optax.chain(CLIP, ADAM))
    expected = moved(state(ADAM), "opt/0/", "opt/1/0/")
    assert saved_of(plain, target) == expected | {"params/b": "params/b", "params/w": "params/w"}


def test_the_optimizers_of_nnx():
    def model_and_optimizer(tx):
        model = nnx.Linear(1, 2, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    found = saved_of(model_and_optimizer(ADAM), model_and_optimizer(optax.chain(CLIP, ADAM)))
    assert found["1/opt_state/1/0/mu/kernel"] == "1/opt_state/0/mu/kernel"
    assert len(found) == 2 + 1 + 5  # parameters, step, count, mu, nu


def test_a_leaf_is_given_away_once():
    """A dict of the target has the name of a moment that has moved."""
    adam = ADAM.init(PARAMS)[0]
    pairs = pairs_of({"d": (adam,)}, {"d": ({"mu": {"w": 1}}, adam)})
    assert len(set(pairs.saved.values())) == len(pairs.saved)


# Any trees

OPTIMIZERS = [ADAM, optax.chain(CLIP, ADAM), optax.chain(optax.scale_by_adam(), SCHEDULE),
              optax.sgd(0.1, momentum=0.9), optax.MultiSteps(ADAM, 2), halves(ADAM)]  # fmt: skip
STATES = [tx.init(PARAMS) for tx in OPTIMIZERS]
KEYS = st.sampled_from(["a", "b", "0", "1", "a.b", "value", "raw_value", "count", "mu", "w", "x"])


def containers(inner):
    return st.one_of(
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(st.integers(0, 2), inner, max_size=2),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Point, inner, inner),
        st.builds(lambda value: nn.Partitioned(value, names=("a",)), st.just(0)),
    )


trees = st.recursive(st.just(0) | st.sampled_from(STATES), containers, max_leaves=6)


@given(trees, trees)
@settings(max_examples=70)
@example(({"mu": {"w": 1}}, STATES[0][0]), STATES[0])
@example(STATES[0], ({"mu": {"w": 1}}, STATES[0][0]))
def test_no_leaf_is_given_to_two_and_none_is_made_up(saved, target):
    pairs = pairs_of(saved, target)
    assert len(set(pairs.saved.values())) == len(pairs.saved)
    assert pairs.saved.keys() <= set(names_of(target))
    assert set(pairs.saved.values()) <= set(names_of(saved))
    assert not pairs.saved.keys() & pairs.candidates.keys()


@given(trees)
@settings(max_examples=70)
def test_in_equal_trees_every_leaf_is_paired_with_itself(tree):
    assert saved_of(tree, tree) == {name: name for name in names_of(tree)}


@given(trees, trees)
@settings(max_examples=70)
def test_leaves_of_states_of_different_classes_are_never_paired(saved, target):
    flats = flatten(saved), flatten(target)
    ours, theirs = (places_of(flat.nodes) for flat in flats)
    for name, found in pairs_of(saved, target).saved.items():
        a, b = ours[found].state, theirs[name].state
        if a is not None and b is not None:
            assert a.class_name == b.class_name
