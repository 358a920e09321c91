"""Host memory for arrays that are read."""

from __future__ import annotations

import math

import numpy as np

# A CPU device adopts memory of this alignment as it is; what is less aligned it copies.
ALIGNMENT = 64
# Below this size a copy is cheaper than the alignment.
MIN_BYTES = 1 << 15


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory for an array of `shape`, not set to anything; aligned for jax when it is large."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < MIN_BYTES:
        return np.empty(shape, dtype)
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(shape)
