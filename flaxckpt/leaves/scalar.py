"""Python numbers and numpy scalars.

A number that Orbax can hold (bool, an int of 64 bits, float) is stored as the 0-d array that
Orbax would write; larger ints and complex numbers are JSON.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flaxckpt.leaves.dtypes import dtype_name, parse_dtype
from flaxckpt.leaves.spec import LeafSpec

_PYTHON: dict[str, Any] = {t.__name__: t for t in (bool, int, float, complex)}


class PythonNumbers:
    """`bool`, `int` of any size, `float` and `complex`; no subclasses."""

    def describe(self, leaf: Any) -> LeafSpec | None:
        """The spec of a number of exactly these types."""
        return LeafSpec(type(leaf).__name__) if type(leaf) in _PYTHON.values() else None

    def encode(self, leaf: Any) -> np.ndarray | Any:
        """A 0-d array, a decimal, or two hexadecimal floats."""
        if type(leaf) is complex:
            return [leaf.real.hex(), leaf.imag.hex()]
        if type(leaf) is int:
            if not -(1 << 63) <= leaf < 1 << 64:
                return hex(leaf)
            return np.array(leaf, np.int64 if leaf < 1 << 63 else np.uint64)
        return np.array(leaf)

    def decode(self, spec: LeafSpec, stored: Any) -> Any:
        """The number as the Python type of `spec`."""
        if isinstance(stored, np.ndarray):
            return _PYTHON[spec.kind](stored[()])
        if spec.kind == "complex":
            return complex(*map(float.fromhex, stored))
        return int(stored, 16)


class NumpyScalars:
    """`numpy.generic` but text: `np.float32(2)`, `bfloat16(2)`, `np.datetime64("2026")`, ..."""

    def describe(self, leaf: Any) -> LeafSpec | None:
        """The spec of a scalar whose dtype has a name in a checkpoint."""
        if not isinstance(leaf, np.generic) or isinstance(leaf, np.str_ | np.bytes_):
            return None  # arrays of strings drop NULs at the end; see `leaves.text`
        name = dtype_name(leaf.dtype)
        return None if name is None else LeafSpec("numpy_scalar", name)

    def encode(self, leaf: np.generic) -> np.ndarray:
        """A 0-d array."""
        return np.asarray(leaf)

    def decode(self, spec: LeafSpec, stored: np.ndarray) -> np.generic:
        """The scalar of its own type."""
        scalar: np.generic = stored.astype(parse_dtype(spec.dtype), copy=False)[()]  # type: ignore[assignment]
        return scalar
