"""Strings, bytes, and numpy arrays of strings of any length."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from flaxckpt.leaves.record import LeafSpec


class Strings:
    """`str`, as JSON; halves of surrogate pairs, which JSON cannot hold, as UTF-16 in base64."""

    def describe(self, leaf: Any) -> LeafSpec | None:
        """The spec of a string of exactly this type."""
        return LeafSpec("str") if type(leaf) is str else None

    def encode(self, leaf: str) -> Any:
        """The string, or `{"utf-16": base64}`."""
        try:
            leaf.encode()
        except UnicodeEncodeError:
            return {"utf-16": _to_base64(leaf.encode("utf-16-le", "surrogatepass"))}
        return leaf

    def decode(self, spec: LeafSpec, stored: Any) -> str:
        """The string."""
        del spec
        if isinstance(stored, str):
            return stored
        return _from_base64(stored["utf-16"]).decode("utf-16-le", "surrogatepass")


class Bytes:
    """`bytes`, as base64."""

    def describe(self, leaf: Any) -> LeafSpec | None:
        """The spec of bytes of exactly this type."""
        return LeafSpec("bytes") if type(leaf) is bytes else None

    def encode(self, leaf: bytes) -> str:
        """Base64."""
        return _to_base64(leaf)

    def decode(self, spec: LeafSpec, stored: str) -> bytes:
        """The bytes."""
        del spec
        return _from_base64(stored)


class StringArrays:
    """numpy's `StringDType` arrays, as a list of strings. (Those of fixed width are `numpy`.)"""

    def describe(self, leaf: Any) -> LeafSpec | None:
        """The spec of an array of strings without a missing value."""
        if not isinstance(leaf, np.ndarray) or leaf.dtype.kind != "T":
            return None
        return None if hasattr(leaf.dtype, "na_object") else LeafSpec("strings")

    def encode(self, leaf: np.ndarray) -> Any:
        """The shape and the strings in C order."""
        return {"shape": list(leaf.shape), "strings": [str(s) for s in leaf.reshape(-1)]}

    def decode(self, spec: LeafSpec, stored: Any) -> np.ndarray:
        """The array."""
        del spec
        return np.array(stored["strings"], np.dtypes.StringDType()).reshape(stored["shape"])


def _to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
