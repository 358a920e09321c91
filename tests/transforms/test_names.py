import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxckpt
from flaxckpt import Drop, Rename
from flaxckpt.errors import RuleError, StructureMismatchError
from tests.reads import Reads
from tests.transforms import state_of, values_of

TREE = {
    "classifier": {"bias": np.zeros(2), "kernel": np.ones((3000, 2))},
    "body": {"kernel": np.full(20_000, 2.0)},
    "step": 7,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("names") / "x"
    flaxckpt.save(path, TREE)
    return path


def names(transform, *state):
    return list(transform(state_of(dict.fromkeys(state, 1)), {}))


# Rename


def test_renamed_without_a_target(saved):
    restored = flaxckpt.restore(saved, transforms=[Rename("classifier/(.*)", r"head/\1")])
    assert {name: sorted(inner) for name, inner in restored.items() if name != "step"} == {
        "head": ["bias", "kernel"],
        "body": ["kernel"],
    }
    assert (restored["head"]["kernel"] == 1).all()
    assert restored["step"] == 7


def test_renamed_into_a_target(saved):
    target = {
        "head": {"bias": np.ones(2), "kernel": np.zeros((3000, 2))},
        "body": {"kernel": np.zeros(20_000)},
        "step": 0,
    }
    restored = flaxckpt.restore(saved, target, transforms=[Rename("classifier/(.*)", r"head/\1")])
    assert (restored["head"]["kernel"] == 1).all()
    assert (restored["head"]["bias"] == 0).all()
    assert (restored["body"]["kernel"] == 2).all()
    assert restored["step"] == 7


def test_the_order_and_what_does_not_match_stay():
    assert names(Rename("b/(.*)", r"z/\1"), "a", "b/c", "bb/c", "d") == ["a", "z/c", "bb/c", "d"]


def test_only_a_whole_key_path_matches():
    assert names(Rename("b.", "z", optional=True), "b/c", "a/bc", "abc") == ["b/c", "a/bc", "abc"]


def test_the_path_of_a_node_means_its_subtree():
    found = "a/b/c", "a/b", "a/bc", "ab", "x.y/z", "xxy/z"
    assert names(Rename("a/b", "z"), *found) == ["z/c", "z", *found[2:]]
    assert names(Rename("a", ""), *found) == ["b/c", "b", "bc", *found[3:]]
    assert names(Rename("x.y", r"\g<0>/0"), *found)[4:] == ["x.y/0/z", "xxy/z"]
    assert names(Rename("", "top"), "a", "b/c") == ["top/a", "top/b/c"]
    assert names(Drop("a"), *found) == [*found[3:]]
    assert names(Drop("/x.y/"), *found) == [*found[:4], "xxy/z"]


def test_a_glob_is_an_error_even_in_an_optional_rule():
    for rule in (Drop("a/*", optional=True), Drop("**"), Rename("*/c", "c")):
        with pytest.raises(RuleError, match="are regular expressions, not globs: use '"):
            names(rule, "a/b/c", "d")


def test_groups_in_another_order():
    assert names(Rename("(?P<a>[^/]+)/(.+)", r"\2/\g<a>"), "x/y", "u/v") == ["y/x", "v/u"]


def test_two_names_are_swapped_in_one_rule_each():
    swap = [Rename("a", "tmp"), Rename("b", "a"), Rename("tmp", "b")]
    state = state_of({"a": 1, "b": 2})
    for rule in swap:
        state = rule(state, {})
    assert values_of(state) == {"b": 1, "a": 2}


def test_the_order_of_rules_matters(saved):
    to_b, to_c = Rename("step", "b"), Rename("b", "c")
    assert flaxckpt.restore(saved, transforms=[to_b, to_c])["c"] == 7
    with pytest.raises(RuleError, match="'b' matches no key path"):
        flaxckpt.restore(saved, transforms=[to_c, to_b])


def test_two_leaves_of_one_name_are_refused():
    with pytest.raises(RuleError) as raised:
        names(Rename("[ab]", "c"), "a", "b")
    assert str(raised.value) == (
        "Rename(pattern='[ab]', replacement='c', optional=False) makes two leaves of the key path "
        "c: a and b. Drop one of them first."
    )
    with pytest.raises(RuleError, match="makes two leaves of the key path b: a and b"):
        names(Rename("a", "b"), "a", "b")
    assert names(Drop("b"), "a", "b") == ["a"]


def test_a_rule_that_matches_nothing(saved):
    with pytest.raises(RuleError) as raised:
        flaxckpt.restore(saved, transforms=[Rename("clasifier/kernel", "head")])
    assert str(raised.value) == (
        "Rename(pattern='clasifier/kernel', replacement='head', optional=False): "
        "'clasifier/kernel' matches no key path as a whole. The closest are classifier/kernel, "
        "classifier/bias, body/kernel. Fix the pattern, or pass optional=True."
    )


def test_where_there_is_nothing_to_match():
    with pytest.raises(RuleError, match="closest are none, because there are no leaves. Fix the"):
        Drop(".*")({}, {})


@pytest.mark.parametrize("rule", [Rename("x", "y", optional=True), Drop("x", optional=True)])
def test_an_optional_rule_may_match_nothing(rule):
    assert names(rule, "a", "b") == ["a", "b"]


@pytest.mark.parametrize("rule", [Rename("(", "y"), Drop("(", optional=True)])
def test_what_is_no_regular_expression(rule):
    with pytest.raises(RuleError, match=r"'\(' is not a valid regular expression: missing \)"):
        names(rule, "a")


@pytest.mark.parametrize("replacement", [r"\1", r"\g<x>", r"\q", r"\g<"])
def test_a_replacement_that_does_not_fit(replacement):
    with pytest.raises(RuleError, match="does not fit its pattern"):
        names(Rename("a", replacement), "a")


def test_a_leaf_below_another_one_needs_a_target(saved):
    rule = Rename("body/kernel", "step/x")
    with pytest.raises(RuleError) as raised:
        flaxckpt.restore(saved, transforms=[rule])
    assert str(raised.value) == ("step/x lies below another leaf. Rename or drop one of the two.")


def test_a_rename_says_what_moves_in_an_optimizer_where_names_mean_something_else(tmp_path):
    """The count of a schedule is saved under the name that Adam's has in the target."""
    schedule = optax.scale_by_schedule(lambda count: 1.0)
    adam, count = optax.scale_by_adam().init({"w": jnp.ones(2)}), schedule.init({})
    adam, count = adam._replace(count=jnp.int32(11)), count._replace(count=jnp.int32(22))
    flaxckpt.save(tmp_path / "x", {"opt": (adam, count)})
    target = {"opt": (optax.EmptyState(), adam._replace(count=0), count._replace(count=0))}
    rules = [Rename("opt/1/count", "opt/2/count"), Rename("opt/0/(.*)", r"opt/1/\1")]
    for transforms in (rules, []):
        restored = flaxckpt.restore(tmp_path / "x", target, transforms=transforms)["opt"]
        assert [restored[1].count, restored[2].count] == [11, 22]


def test_the_report_tells_what_was_renamed(tmp_path):
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        ckpt.save(0, TREE)
        ckpt.restore(
            {"head": {"bias": np.ones(2), "kernel": np.zeros((3000, 2))}},
            only=["classifier", "head"],
            transforms=[Rename("classifier/(.*)", r"head/\1")],
        )
    assert ckpt.report.renamed == (
        ("classifier/bias", "head/bias"),
        ("classifier/kernel", "head/kernel"),
    )


# Drop


def test_dropped_leaves_are_not_read(saved, monkeypatch):
    reads = Reads(monkeypatch)
    restored = flaxckpt.restore(saved, transforms=[Drop("body/.*")])
    assert sorted(restored) == ["classifier", "step"]
    assert 48_000 < reads.nbytes < 60_000


def test_dropped_leaves_are_missing_in_the_target(saved):
    target = {"classifier": TREE["classifier"], "step": 0}
    restored = flaxckpt.restore(saved, target, transforms=[Drop("body/.*")])
    assert restored["step"] == 7
    with pytest.raises(StructureMismatchError) as raised:
        flaxckpt.restore(saved, target, transforms=[Drop("body/.*|step")])
    assert [(m.problem, m.name) for m in raised.value.mismatches] == [("missing", "step")]


def test_all_is_dropped(saved):
    assert flaxckpt.restore(saved, transforms=[Drop(".*")]) == {}
