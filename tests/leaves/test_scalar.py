from __future__ import annotations

import contextlib
import enum
import math
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flaxckpt.errors import UnsupportedLeafError
from flaxckpt.leaves import kinds
from flaxckpt.leaves.scalar import PythonNumbers
from tests.leaves.helpers import round_trip, same_bits


@given(st.integers())
@example(2**63 - 1)
@example(2**63)
@example(2**64 - 1)
@example(2**64)
@example(-(2**63))
@example(-(2**63) - 1)
@example(10**5000)
def test_an_int_of_any_size_comes_back(value):
    back = round_trip(value)
    assert type(back) is int
    assert back == value


@given(st.floats())
@example(-0.0)
@example(struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_DEAD_BEEF))[0])
def test_a_float_comes_back_bit_for_bit(value):
    back = round_trip(value)
    assert type(back) is float
    assert struct.pack("<d", back) == struct.pack("<d", value)


@given(st.complex_numbers())
@example(complex(-0.0, math.nan))
@example(complex(math.inf, -0.0))
def test_a_complex_number_comes_back(value):
    back = round_trip(value)
    assert type(back) is complex
    assert repr(back) == repr(value)


@pytest.mark.parametrize("value", [True, False])
def test_a_bool_is_not_an_int(value):
    assert round_trip(value) is value


@pytest.mark.parametrize("value", [enum.IntEnum("E", ["A"]).A, type("F", (float,), {})(1.0)])
def test_a_subclass_of_a_number_is_refused(value):
    with pytest.raises(UnsupportedLeafError, match="register_leaf_handler"):
        round_trip(value)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(True, "bool"), (-1, "int64"), (2**63, "uint64"), (1.5, "float64")],
)
def test_a_number_that_orbax_can_hold_is_an_array(value, dtype):
    stored = PythonNumbers().encode(value)
    assert (stored.dtype, stored.shape) == (np.dtype(dtype), ())


@pytest.mark.parametrize(
    "scalar",
    [np.float32(1.5), np.bool_(True), np.int8(-3), np.uint64(2**64 - 1), np.complex64(1j),
     np.longdouble(1) / 3, np.str_("ab"), np.bytes_(b"ab"), np.datetime64("2020-01-01"),
     np.timedelta64(3, "ms"), ml_dtypes.bfloat16(1.5), ml_dtypes.int4(-3), ml_dtypes.uint4(3),
     ml_dtypes.float8_e4m3(2), np.float64("nan"), np.float16("-0.0")],
    ids=lambda s: type(s).__name__,
)  # fmt: skip
def test_a_numpy_scalar_comes_back_in_its_own_type(scalar):
    assert same_bits(round_trip(scalar), scalar)


@pytest.mark.parametrize("scalar", [np.str_("a\0"), np.bytes_(b"a\0")])
def test_a_numpy_string_that_ends_in_nul_is_kept_or_refused(scalar):
    with contextlib.suppress(UnsupportedLeafError):
        assert round_trip(scalar) == scalar


def test_a_record_is_refused():
    with pytest.raises(UnsupportedLeafError, match=r"numpy.void of dtype"):
        round_trip(np.zeros(1, [("a", "i4")])[0])


def test_a_numpy_float_is_not_a_python_float():
    assert kinds.describe(np.float64(1), "x")[0].kind == "numpy_scalar"
