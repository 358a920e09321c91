from __future__ import annotations

import math

import flax.linen as nn
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from flaxckpt.sharding.specs import from_box, misfit
from flaxckpt.tree.keypaths import first_match

RULES = [("embed", "data"), ("mlp", "model"), ("mlp", "other"), ("heads", None)]


@pytest.mark.parametrize(
    ("names", "rules", "spec"),
    [
        (("data", None), None, P("data", None)),
        (("embed", "mlp"), RULES, P("data", "model")),
        (("heads", "unknown"), RULES, P(None, "unknown")),
        ((), RULES, P()),
        (("mlp",), [("mlp", ("data", "model"))], P(("data", "model"))),
    ],
)
def test_the_names_of_a_partitioned_become_axes_of_the_mesh(names, rules, spec):
    assert from_box(nn.Partitioned(jnp.ones(2), names=names), rules) == spec


@pytest.mark.parametrize(
    ("names", "spec"),
    [
        (("embed", "mlp"), P("data", "model")),
        (("embed", "unknown"), P("data", None)),
        (("heads",), P(None)),
    ],
)
def test_the_names_of_a_logically_partitioned_become_axes_by_the_rules(names, spec):
    assert from_box(nn.LogicallyPartitioned(jnp.ones(2), names=names), RULES) == spec


def test_the_rules_of_the_context_are_used_when_none_are_given():
    box = nn.LogicallyPartitioned(jnp.ones(2), names=("embed",))
    with nn.logical_axis_rules(RULES):
        assert from_box(box, None) == P("data")
    assert from_box(box, None) == P(None)


def test_the_rules_of_a_box_are_used_when_none_are_given():
    box = nn.LogicallyPartitioned(jnp.ones(2), names=("embed",), rules=[("embed", "own")])
    assert from_box(box, None) == P("own")


def variable(**metadata):
    """An nnx variable that is not put onto a mesh."""
    return nnx.Param(jnp.ones(2), eager_sharding=False, **metadata)


def test_the_names_of_an_nnx_variable_become_axes_of_the_mesh():
    assert from_box(variable(out_sharding=("embed", None)), RULES) == P("data", None)


def test_the_rules_of_an_nnx_variable_are_used_when_none_are_given():
    box = variable(out_sharding=("embed",), sharding_rules=[("embed", "own")])
    assert from_box(box, None) == P("own")
    assert from_box(box, RULES) == P("data")


def test_a_partition_spec_on_an_nnx_variable_is_taken():
    assert from_box(variable(out_sharding=P("x", ("y", "z"))), None) == P("x", ("y", "z"))


def test_a_variable_that_says_nothing_gives_no_spec():
    assert from_box(variable(), RULES) is None


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("params/a/kernel", P("first")),
        ("params/kernel", P("second")),
        ("params/a/kernel/x", None),
        ("xparams/a/kernel", None),
    ],
)
def test_the_first_pattern_that_matches_the_whole_path_wins(name, spec):
    specs = {"params/.*/kernel": P("first"), "params/(.*/)?kernel": P("second")}
    assert first_match(specs, [name], "specs").get(name) == spec


@pytest.mark.parametrize(
    ("spec", "shape", "why"),
    [
        (P(), (), ""),
        (P("x"), (4,), ""),
        (P(("x", "y")), (8, 3), ""),
        (P(None, "y"), (3, 4), ""),
        (P(P.UNCONSTRAINED), (3,), ""),
        (P("x"), (0,), ""),
        (P("x"), (3,), "axis 0 of size 3 is not divisible by 2 (x)"),
        (P(None, ("x", "y")), (1, 4), "axis 1 of size 4 is not divisible by 8 (x, y)"),
        (P("x"), (), "the spec has 1 entries, the array 0 axes"),
        (P("z"), (2,), "the mesh has no axis 'z', only x, y"),
        (P("x", "x"), (2, 2), "the mesh axis 'x' is used twice"),
        (P(("x", "x")), (4,), "the mesh axis 'x' is used twice"),
    ],
)
def test_why_a_spec_does_not_fit(spec, shape, why):
    assert misfit(spec, shape, {"x": 2, "y": 4}) == why


_entries = st.sampled_from((None, "x", "y", "z", ("x", "y"), ("y", "x")))


@given(st.lists(_entries, max_size=3), st.lists(st.integers(0, 12), max_size=3))
def test_a_spec_fits_when_each_axis_can_be_cut_evenly(entries, shape):
    axes = {"x": 2, "y": 3}
    names = [(e,) if isinstance(e, str) else e or () for e in entries]
    used = [n for group in names for n in group]
    fits = (
        len(entries) <= len(shape)
        and len(set(used)) == len(used)
        and set(used) <= set(axes)
        and all(
            n % math.prod(axes.get(name, 1) for name in group) == 0
            for n, group in zip(shape, names, strict=False)
        )
    )
    try:
        spec = P(*entries)
    except ValueError:  # jax itself refuses an axis that is used twice
        return
    assert (misfit(spec, shape, axes) == "") is fits
