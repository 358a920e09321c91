"""Whether a saved leaf fits a target, and what it becomes there. Pure decisions.

The caller's type wins where no bit of the value is lost: a Python number becomes the 0-d array
that jax would make of it and back, a jax array becomes a numpy one. What would lose bits, or give
bits another meaning, is a mismatch.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np

from flaxckpt.leaves.dtypes import parse_dtype
from flaxckpt.leaves.spec import ARRAY_KINDS, SCALAR_KINDS, LeafSpec

DtypePolicy = Literal["error", "widen", "cast", "saved"]

# What jax narrows, unless jax_enable_x64 is on.
_WIDE = frozenset({"int64", "uint64", "float64", "complex128"})

# What jax may make of a Python number without being asked for a dtype.
_CATEGORY = {
    "bool": np.bool_,
    "int": np.integer,
    "float": np.floating,
    "complex": np.complexfloating,
}


def problem(saved: LeafSpec, target: LeafSpec, policy: DtypePolicy) -> str:
    """Why `saved` does not fit `target`: `kind`, `shape`, `dtype`, `key impl`; `""` if it fits.

    Args:
      saved: the checkpoint's side.
      target: the caller's side.
      policy: `error` and `saved` allow no change of dtype, `widen` floats to wider floats, `cast`
        any.
    """
    numeric = SCALAR_KINDS | ARRAY_KINDS
    if saved.kind not in numeric or target.kind not in numeric:
        return _other_problem(saved, target)
    if saved.shape != target.shape:
        return "shape"
    if saved.kind in SCALAR_KINDS and target.kind in SCALAR_KINDS:
        return "" if saved.kind == target.kind else "kind"
    if saved.kind in SCALAR_KINDS:
        return "" if policy == "cast" or _in_category(target, saved.kind) else "dtype"
    if target.kind in SCALAR_KINDS:
        return "" if policy == "cast" or _in_category(saved, target.kind) else "dtype"
    return "" if _dtype_fits(saved.dtype, target.dtype, policy) else "dtype"


def restored_as(saved: LeafSpec, target: LeafSpec, policy: DtypePolicy) -> LeafSpec:
    """The type that a restored leaf gets: the target's, with `saved` in the checkpoint's dtype.

    Example:
      >>> bits16, bits32 = LeafSpec("numpy", "bfloat16", (2,)), LeafSpec("jax", "float32", (2,))
      >>> str(restored_as(bits16, bits32, "error")), str(restored_as(bits16, bits32, "saved"))
      ('float32[2]', 'bfloat16[2]')
    """
    if policy != "saved" or problem(saved, target, "error") != "dtype":
        return target
    if target.kind in SCALAR_KINDS:
        kinds = [kind for kind in _CATEGORY if _in_category(saved, kind)]
        return LeafSpec(kinds[0]) if kinds else target
    dtype = np.dtype(saved.kind).name if saved.kind in SCALAR_KINDS else saved.dtype
    weak = target.kind == "jax" and saved.weak_type
    spec = target._replace(dtype=dtype, weak_type=weak)
    return canonical(spec) if saved.kind in SCALAR_KINDS else spec


def _other_problem(saved: LeafSpec, target: LeafSpec) -> str:
    """`problem` for leaves that are not numbers."""
    if saved.kind != target.kind:
        return "kind"
    if saved.impl != target.impl:
        return "key impl" if saved.kind == "prng_key" else "kind"
    return "" if saved.shape == target.shape else "shape"


def _in_category(spec: LeafSpec, python_kind: str) -> bool:
    """Whether arrays of `spec` hold what a Python number of `python_kind` is."""
    return jax.dtypes.issubdtype(parse_dtype(spec.dtype), _CATEGORY[python_kind])


def _dtype_fits(saved: str, target: str, policy: DtypePolicy) -> bool:
    """Whether an array of dtype `saved` may become one of `target`."""
    if saved == target or policy == "cast":
        return True
    return policy == "widen" and _is_wider(parse_dtype(target), parse_dtype(saved))


def _is_wider(wide: np.dtype, narrow: np.dtype) -> bool:
    """Whether both are floats, and `wide` has more bits and every value of `narrow`."""
    if not all(jax.dtypes.issubdtype(dtype, np.floating) for dtype in (wide, narrow)):
        return False
    a, b = ml_dtypes.finfo(wide), ml_dtypes.finfo(narrow)
    holds = a.nmant >= b.nmant and a.maxexp >= b.maxexp and a.minexp <= b.minexp
    return bool(a.bits > b.bits and holds)


def cast(array: np.ndarray, dtype: str) -> np.ndarray:
    """`array` as `dtype`.

    Raises:
      OverflowError: when `array` is a Python number's and does not fit.
    """
    wanted = parse_dtype(dtype)
    return array if array.dtype == wanted else array.astype(wanted)


def check_range(array: np.ndarray, dtype: Any) -> None:
    """Refuses a Python number, as a 0-d array, that `dtype` cannot hold.

    A float may lose digits where jax itself would drop them (in float32), and nowhere else.

    Raises:
      OverflowError: in that case.
    """
    if array.dtype.kind in "iu" and jax.dtypes.issubdtype(dtype, np.integer):
        limits = jax.numpy.iinfo(dtype)
        if not int(limits.min) <= int(array) <= int(limits.max):
            raise OverflowError(f"{int(array)} is out of the range of {np.dtype(dtype).name}")
    elif array.dtype.kind == "f" and np.isfinite(array):
        with np.errstate(over="ignore"):
            found = float(array.astype(dtype))
        exact = np.dtype(dtype).itemsize < 4
        if not np.isfinite(found) or (exact and found != float(array)):
            raise OverflowError(f"{float(array)} would become {found} in {np.dtype(dtype).name}")


def canonical(spec: LeafSpec) -> LeafSpec:
    """`spec` as jax can hold it now: without 64-bit types where they are off."""
    if spec.kind != "jax" or spec.dtype not in _WIDE:
        return spec
    dtype = jax.dtypes.canonicalize_dtype(parse_dtype(spec.dtype))
    return LeafSpec("jax", np.dtype(dtype).name, spec.shape, spec.weak_type)
