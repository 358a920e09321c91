"""Names of dtypes, and how the bytes of each are stored.

Most dtypes are stored as the zarr data type of the same name. What TensorStore has no data type
for (uint4, float6, float8_e4m3, strings, dates, extended precision) is stored as its bytes: a
uint8 array, with one more axis of `itemsize` where an element has several. The name says what
the bytes are. Values of fewer than 8 bits take one byte each, as they do in numpy.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import ml_dtypes
import numpy as np

# zarr3 data types of TensorStore 0.1.86 for which numpy or ml_dtypes has a dtype of that name.
ZARR_DATA_TYPES = frozenset(
    "bool int2 int4 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 "
    "float64 complex64 complex128 float4_e2m1fn float8_e3m4 float8_e4m3b11fnuz float8_e4m3fn "
    "float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu".split()
)

_NUMPY_ONLY = frozenset({"longdouble", "clongdouble", "float96", "float128", "complex256"})

# Fixed-width strings and bytes, dates and durations; and numbers in the other byte order.
_BY_FORMAT = re.compile(r"[<>|](U|S)[1-9]\d{0,8}|[<>][Mm]8(\[\d{0,9}(Y|M|W|D|h|m|s|[munpfa]s)\])?")
_SWAPPED = re.compile(r">[iufc](2|4|8|16|32)")


@dataclasses.dataclass(frozen=True)
class Storage:
    """How the elements of a dtype lie in a zarr array.

    Attributes:
      data_type: the name of the zarr data type.
      dtype: the numpy dtype of the stored elements, little-endian.
      is_native: whether the zarr data type is the dtype's own, and so only its byte order differs.
      extra: the axes that the stored array has more, at its end.
    """

    data_type: str
    dtype: np.dtype
    is_native: bool
    extra: tuple[int, ...] = ()


@functools.lru_cache(maxsize=256)
def dtype_name(dtype: np.dtype) -> str | None:
    """The name of `dtype` in a checkpoint; `None` when no checkpoint can hold it.

    Example:
      >>> dtype_name(np.dtype("float32")), dtype_name(np.dtype(">i2"))
      ('float32', '>i2')
    """
    for name in (dtype.name, dtype.str):
        try:
            if parse_dtype(name) == dtype:
                return name
        except ValueError:
            continue
    return None


@functools.lru_cache(maxsize=256)
def parse_dtype(name: str) -> np.dtype:
    """The numpy dtype called `name`; only names that `dtype_name` gives are accepted.

    Raises:
      ValueError: for any other name. In particular, no name leads to a dtype that holds objects.
    """
    if name in ZARR_DATA_TYPES or name in _ml_dtype_names():
        return np.dtype(getattr(ml_dtypes, name, name))
    if name in _NUMPY_ONLY or _BY_FORMAT.fullmatch(name) or _SWAPPED.fullmatch(name):
        try:
            return np.dtype(name)
        except TypeError:
            raise ValueError(f"this platform has no dtype {name!r}") from None
    raise ValueError(f"not the name of a dtype: {name!r}")


@functools.lru_cache
def _ml_dtype_names() -> frozenset[str]:
    """The dtypes of the installed ml_dtypes."""
    classes = (c for c in vars(ml_dtypes).values() if isinstance(c, type))
    return frozenset(c.__name__ for c in classes if issubclass(c, np.generic))


@functools.lru_cache(maxsize=256)
def storage_of(name: str) -> Storage:
    """How arrays of the dtype `name` are stored."""
    native = parse_dtype(name).newbyteorder("<") if _SWAPPED.fullmatch(name) else parse_dtype(name)
    if native.name in ZARR_DATA_TYPES:
        return Storage(native.name, native, is_native=True)
    extra = () if native.itemsize == 1 else (native.itemsize,)
    return Storage("uint8", np.dtype(np.uint8), is_native=False, extra=extra)


def is_floating(name: str) -> bool:
    """Whether the dtype `name` is one of floating-point numbers.

    Raises:
      ValueError: when there is no dtype of that name.

    Example:
      >>> is_floating("bfloat16"), is_floating("int4")
      (True, False)
    """
    dtype = parse_dtype(name)
    try:
        ml_dtypes.finfo(dtype)
    except ValueError:
        return False
    return dtype.kind != "c"


def to_stored(array: np.ndarray, name: str) -> np.ndarray:
    """`array`, of the dtype `name`, as the elements that are stored (a view where it can be)."""
    storage = storage_of(name)
    if storage.is_native:
        return array.astype(storage.dtype, copy=False)
    elements = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return elements.reshape((*array.shape, *storage.extra))


def from_stored(stored: np.ndarray, name: str) -> np.ndarray:
    """The inverse of `to_stored`."""
    storage, dtype = storage_of(name), parse_dtype(name)
    if storage.is_native:
        return stored.astype(dtype, copy=False)
    shape = stored.shape[: stored.ndim - len(storage.extra)]
    return np.ascontiguousarray(stored).reshape(-1).view(dtype).reshape(shape)
