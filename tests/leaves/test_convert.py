from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flaxckpt.leaves.conversion import canonical, cast, check_range, problem
from flaxckpt.leaves.dtypes import ZARR_DATA_TYPES, parse_dtype
from flaxckpt.leaves.spec import LeafSpec

SMALL_FLOATS = sorted(
    n
    for n in ZARR_DATA_TYPES
    if "float" in n and parse_dtype(n).itemsize <= 2 and "float4" not in n
)
policies = st.sampled_from(("error", "widen", "cast"))
_shapes = st.sampled_from(((), (2,), (2, 3)))
specs = st.one_of(
    st.builds(LeafSpec, st.sampled_from(("jax", "numpy")), st.sampled_from(sorted(ZARR_DATA_TYPES)),
              _shapes),
    st.builds(LeafSpec, st.just("numpy_scalar"), st.sampled_from(("int8", "float32"))),
    st.builds(LeafSpec, st.sampled_from(("bool", "int", "float", "complex", "str", "bytes"))),
    st.builds(LeafSpec, st.just("prng_key"), shape=_shapes, impl=st.sampled_from(("rbg", "x"))),
    st.builds(LeafSpec, st.just("generator"), impl=st.sampled_from(("PCG64", "SFC64"))),
)  # fmt: skip
INT, FLOAT = LeafSpec("int"), LeafSpec("float")


def jax_spec(dtype: str, shape: tuple[int, ...] = ()) -> LeafSpec:
    """The spec of a jax array."""
    return LeafSpec("jax", dtype, shape)


@given(specs, policies)
def test_a_leaf_fits_itself(spec, policy):
    assert problem(spec, spec, policy) == ""


@given(specs, specs)
def test_what_fits_without_a_change_of_dtype_fits_with_one(saved, target):
    if problem(saved, target, "error") == "":
        assert problem(saved, target, "widen") == problem(saved, target, "cast") == ""


@given(specs, specs, policies)
def test_arrays_of_two_shapes_never_fit(saved, target, policy):
    if saved.shape != target.shape:
        assert problem(saved, target, policy) != ""


@given(specs, specs)
def test_only_a_dtype_problem_can_be_cast_away(saved, target):
    if (why := problem(saved, target, "error")) != "dtype":
        assert problem(saved, target, "cast") == why


@pytest.mark.parametrize(
    ("saved", "target", "why"),
    [
        (jax_spec("float32"), LeafSpec("numpy", "float32"), ""),
        (LeafSpec("numpy_scalar", "float32"), jax_spec("float32"), ""),
        (jax_spec("float32", (2,)), jax_spec("float32", (3,)), "shape"),
        (jax_spec("float32", (1,)), jax_spec("float32"), "shape"),
        (jax_spec("float32"), jax_spec("bfloat16"), "dtype"),
        (jax_spec("float16"), jax_spec("float32"), "dtype"),
        (INT, jax_spec("int32"), ""),
        (jax_spec("int32"), INT, ""),
        (INT, jax_spec("float32"), "dtype"),
        (FLOAT, jax_spec("bfloat16"), ""),
        (FLOAT, jax_spec("int32"), "dtype"),
        (INT, jax_spec("int32", (1,)), "shape"),
        (LeafSpec("bool"), INT, "kind"),
        (INT, FLOAT, "kind"),
        (INT, LeafSpec("str"), "kind"),
        (LeafSpec("prng_key", impl="rbg"), LeafSpec("prng_key", impl="unsafe_rbg"), "key impl"),
        (LeafSpec("prng_key", shape=(2,), impl="rbg"), LeafSpec("prng_key", impl="rbg"), "shape"),
        (LeafSpec("prng_key", impl="rbg"), jax_spec("uint32", (4,)), "kind"),
        (LeafSpec("generator", impl="PCG64"), LeafSpec("generator", impl="SFC64"), "kind"),
    ],
    ids=str,
)
def test_what_fits_what(saved, target, why):
    assert problem(saved, target, "error") == why


@pytest.mark.parametrize("a", SMALL_FLOATS)
def test_floats_are_only_widened_where_every_value_survives(a):
    dtype = parse_dtype(a)
    every = np.arange(1 << 8 * dtype.itemsize).astype(f"u{dtype.itemsize}").view(dtype)
    nan = np.isnan(every.astype(np.float32))
    for b in SMALL_FLOATS:
        if problem(jax_spec(a), jax_spec(b), "widen"):
            continue
        with np.errstate(all="ignore"):
            back = every.astype(parse_dtype(b)).astype(dtype)
        assert (nan == np.isnan(back.astype(np.float32))).all()
        assert every[~nan].tobytes() == back[~nan].tobytes()


@pytest.mark.parametrize(
    ("a", "b", "fits"),
    [
        ("bfloat16", "float32", True),
        ("float16", "float32", True),
        ("float32", "float64", True),
        ("float32", "bfloat16", False),
        ("float16", "bfloat16", False),
        ("float32", "float8_e5m2", False),
        ("int8", "int32", False),
        ("int32", "float64", False),
        ("float32", "complex64", False),
    ],
)
def test_widening_is_for_floats_only(a, b, fits):
    assert (problem(jax_spec(a), jax_spec(b), "widen") == "") is fits


def test_cast_gives_the_dtype():
    assert cast(np.array([1.5]), "bfloat16").dtype == jnp.bfloat16


def test_cast_to_the_same_dtype_is_no_copy():
    array = np.ones(2)
    assert cast(array, "float64") is array


@pytest.mark.parametrize(("value", "dtype"), [(128, "int8"), (-1, "uint8"), (2**31, "int32")])
def test_an_int_that_the_dtype_cannot_hold_is_refused(value, dtype):
    with pytest.raises(OverflowError, match=f"{value} is out of the range of {dtype}"):
        check_range(np.array(value), parse_dtype(dtype))


@pytest.mark.parametrize(("value", "dtype"), [(127, "int8"), (7, "int4"), (2**40, "float32")])
def test_an_int_that_the_dtype_can_hold_is_accepted(value, dtype):
    check_range(np.array(value), parse_dtype(dtype))


@pytest.mark.parametrize(
    ("spec", "held"),
    [
        (jax_spec("float64", (2,)), jax_spec("float32", (2,))),
        (LeafSpec("jax", "int64", (), True), LeafSpec("jax", "int32", (), True)),
        (jax_spec("bfloat16"), jax_spec("bfloat16")),
        (LeafSpec("numpy", "float64"), LeafSpec("numpy", "float64")),
    ],
)
def test_jax_holds_no_64_bits_by_default(spec, held):
    assert canonical(spec) == held
