from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flaxckpt.leaves.dtypes import (
    ZARR_DATA_TYPES,
    dtype_name,
    from_stored,
    parse_dtype,
    storage_of,
    to_stored,
)

ML_DTYPES = sorted(
    name
    for name, cls in vars(ml_dtypes).items()
    if isinstance(cls, type) and issubclass(cls, np.generic)
)
NATIVE = "? i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 c8 c16 g G".split()
SWAPPED = ">i2 >i4 >i8 >u2 >u4 >u8 >f2 >f4 >f8 >c8 >c16 >g >G".split()
OTHER = "<U5 >U5 S3 M8[ns] >M8[D] M8[25s] m8[ms] M8 m8 <U100000".split()
ALL = [*(np.dtype(getattr(ml_dtypes, name)) for name in ML_DTYPES), *map(np.dtype, NATIVE),
       *map(np.dtype, SWAPPED), *map(np.dtype, OTHER)]  # fmt: skip


def sample(dtype: np.dtype, shape: tuple[int, ...] = (2, 3)) -> np.ndarray:
    """Elements of any bits that are valid for `dtype`."""
    rng = np.random.default_rng(0)
    if dtype.kind in "USMm" or "int" in dtype.name or dtype.name == "bool":
        return rng.integers(0, 2, shape).astype(dtype)
    raw = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    return raw.view(dtype)[..., 0].copy()


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_every_dtype_has_a_name_that_is_its_own(dtype):
    assert parse_dtype(dtype_name(dtype)) == dtype


def test_no_two_dtypes_share_a_name():
    assert len({dtype_name(dtype) for dtype in ALL}) == len(set(ALL))


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 2)], ids=str)
def test_elements_come_back_bit_for_bit(dtype, shape):
    array, name = sample(dtype, shape), dtype_name(dtype)
    back = from_stored(to_stored(array, name).copy(), name)
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_stored_elements_are_of_a_little_endian_zarr_type(dtype):
    storage = storage_of(dtype_name(dtype))
    stored = to_stored(sample(dtype), dtype_name(dtype))
    assert storage.data_type in ZARR_DATA_TYPES
    assert (stored.dtype, stored.shape) == (storage.dtype, (2, 3, *storage.extra))
    assert stored.dtype.byteorder != ">"


@given(st.data())
def test_a_transposed_or_sliced_array_is_stored_in_its_own_order(data):
    dtype = data.draw(st.sampled_from((np.dtype(">i4"), np.dtype(np.longdouble), np.dtype("<U2"))))
    array = np.arange(24).reshape(4, 6).astype(dtype).T
    array = array[data.draw(hnp.basic_indices(array.shape))]
    array = np.asarray(array)
    name = dtype_name(array.dtype)
    assert (from_stored(to_stored(array, name), name) == array).all()


@pytest.mark.parametrize("name", sorted(ZARR_DATA_TYPES))
def test_a_zarr_data_type_is_stored_as_itself(name):
    assert storage_of(name).data_type == name
    assert storage_of(name).extra == ()


@pytest.mark.parametrize(
    ("name", "extra"), [("uint4", ()), ("<U5", (20,)), ("|S3", (3,)), ("<M8[ns]", (8,))]
)
def test_what_zarr_has_no_type_for_is_stored_as_bytes(name, extra):
    assert (storage_of(name).data_type, storage_of(name).extra) == ("uint8", extra)


@pytest.mark.parametrize(
    "dtype",
    [object, [("a", "i4")], "V8", np.dtypes.StringDType(), "S0", "U0", np.dtype(("i4", (2,)))],
    ids=str,
)
def test_a_dtype_that_no_checkpoint_can_hold_has_no_name(dtype):
    assert dtype_name(np.dtype(dtype)) is None


@pytest.mark.parametrize(
    "name",
    ["", "O", "object", "|O", "|V8", "V8", "i4,i4", "(2,)i4", "f4", "<f4", "<i4", "U5", "<U0",
     "<U9999999999", "<M8[x]", "<M8[ns", "finfo", "np", "__name__", "float32\n", "<U5\n", ">i32",
     "int", "StringDType", "void64"],
)  # fmt: skip
def test_no_other_name_is_accepted(name):
    with pytest.raises(ValueError, match="dtype"):
        parse_dtype(name)


@given(st.text(max_size=8) | st.from_regex(r"[<>|][A-Za-z?][0-9]{0,3}(\[[0-9a-zA-Z]*\])?"))
def test_any_text_is_a_dtype_without_objects_or_a_value_error(name):
    try:
        dtype = parse_dtype(name)
    except ValueError:
        return
    assert not dtype.hasobject
    assert dtype.fields is None


@pytest.mark.parametrize("name", sorted(ZARR_DATA_TYPES))
def test_native_elements_are_not_copied(name):
    array = np.zeros((2, 3), parse_dtype(name))
    assert np.shares_memory(to_stored(array, name), array)
