"""Memory that a CPU device takes as it is."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest

from flaxckpt.store.ocdbt import ALIGNMENT, MIN_BYTES, empty


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.complex64, ml_dtypes.bfloat16, bool])
@pytest.mark.parametrize("shape", [(MIN_BYTES,), (3, MIN_BYTES + 1), (1 << 16, 1, 2)])
def test_a_large_array_is_aligned(shape, dtype):
    kept = [empty(shape, np.dtype(dtype)) for _ in range(8)]  # each somewhere else
    for array in kept:
        assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
        assert array.ctypes.data % ALIGNMENT == 0
        assert array.flags.c_contiguous
        assert array.flags.writeable


@pytest.mark.parametrize("shape", [(), (0,), (5, 0, 2), (1, 1), (7, 3)])
def test_a_small_array_is_an_array(shape):
    array = empty(shape, np.dtype(np.int32))
    assert (array.shape, array.dtype) == (shape, np.dtype(np.int32))
    array[...] = 3
    assert (array == 3).all()


def test_arrays_do_not_share_memory():
    a, b = (empty((MIN_BYTES,), np.dtype(np.uint8)) for _ in range(2))
    assert not np.shares_memory(a, b)


@pytest.mark.parametrize("dtype", [np.float32, np.int8, ml_dtypes.bfloat16])
def test_jax_takes_it_without_a_copy(dtype):
    for _ in range(8):
        array = empty((MIN_BYTES, 3), np.dtype(dtype))
        array[...] = 1
        on_device = jax.device_put(array)
        assert on_device.unsafe_buffer_pointer() == array.ctypes.data
        assert (np.asarray(on_device) == 1).all()
