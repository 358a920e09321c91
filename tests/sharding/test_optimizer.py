from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from flaxckpt.sharding.specs import Annotated, index_by_last_key, mirrored_spec

PARAMS = index_by_last_key(
    [
        Annotated(("params", "a", "kernel"), (2, 4), P("x", None)),
        Annotated(("params", "b", "kernel"), (2, 4), P(None, "x")),
        Annotated(("params", "b", "bias"), (4,), P("x")),
        Annotated((), (9,), P("y")),
    ]
)


@pytest.mark.parametrize(
    ("keys", "shape", "spec"),
    [
        (("opt", 0, "mu", "a", "kernel"), (2, 4), P("x", None)),
        (("opt", 0, "mu", "b", "kernel"), (2, 4), P(None, "x")),
        (("opt", 0, "mu", "b", "bias"), (4,), P("x")),
        (("bias",), (4,), P("x")),
        (("opt", "a", "bias"), (4,), P("x")),
        (("opt", 0, "mu", "a", "kernel"), (4,), None),  # factored
        (("opt", 0, "mu", "a", "kernel"), (3, 2, 4), None),  # stacked
        (("opt", "c", "kernel"), (2, 4), None),  # two that are alike, of two specs
        (("opt", 0, "count"), (), None),
        ((), (9,), None),
    ],
)
def test_a_moment_has_the_spec_of_its_parameter(keys, shape, spec):
    assert mirrored_spec(keys, shape, PARAMS) == spec


def test_two_parameters_that_are_alike_and_agree_give_their_spec():
    params = index_by_last_key([Annotated((n, "w"), (2,), P("x")) for n in "ab"])
    assert mirrored_spec(("mu", "w"), (2,), params) == P("x")


def test_a_key_is_compared_whole_and_not_by_its_end():
    params = index_by_last_key([Annotated(("my_kernel",), (2,), P("x"))])
    assert mirrored_spec(("mu", "kernel"), (2,), params) is None


_keys = st.lists(st.sampled_from("ab"), min_size=1, max_size=4).map(tuple)
_params = st.lists(
    st.builds(Annotated, _keys, st.sampled_from(((2,), (3,))), st.sampled_from((P("x"), P("y")))),
    max_size=5,
)


@given(_params, _keys, st.sampled_from(((2,), (3,))))
def test_the_longest_common_suffix_of_the_same_shape_decides(params, keys, shape):
    best, specs = 0, []
    for param in params:
        length = next(
            n for n in range(5, -1, -1) if n == 0 or (keys[-n:] == param.keys[-n:]
            and n <= min(len(keys), len(param.keys)))
        )  # fmt: skip
        if param.shape != shape or length < max(best, 1):
            continue
        specs = [*specs, param.spec] if length == best else [param.spec]
        best = length
    expected = specs[0] if len(set(specs)) == 1 else None
    assert mirrored_spec(keys, shape, index_by_last_key(params)) == expected


@given(_params)
def test_a_parameter_alone_mirrors_itself(params):
    for param in params:
        assert mirrored_spec(param.keys, param.shape, index_by_last_key([param])) == param.spec
