"""Strings, bytes, and numpy arrays of strings of any length."""

from __future__ import annotations

import base64
import dataclasses
from typing import Any

import numpy as np

from flaxckpt.leaves.spec import LeafSpec


@dataclasses.dataclass(frozen=True)
class Strings:
    """Strings of one type, as JSON; halves of surrogate pairs, which JSON has not, as base64."""

    kind: str = "str"
    cls: type[str] = str

    def describe(self, leaf: Any) -> LeafSpec | None:
        """The spec of a string of exactly this type."""
        return LeafSpec(self.kind) if type(leaf) is self.cls else None

    def encode(self, leaf: str) -> Any:
        """The string, or `{"utf-8": base64}`."""
        try:
            leaf.encode()
        except UnicodeEncodeError:
            return {"utf-8": _to_base64(leaf.encode("utf-8", "surrogatepass"))}
        return str.__str__(leaf)  # that of np.str_ drops NULs at the end

    def decode(self, spec: LeafSpec, stored: Any) -> str:
        """The string."""
        del spec
        if isinstance(stored, str):
            return self.cls(stored)
        return self.cls(_from_base64(stored["utf-8"]).decode("utf-8", "surrogatepass"))


@dataclasses.dataclass(frozen=True)
class ByteStrings:
    """Bytes of one type, as base64."""

    kind: str = "bytes"
    cls: type[bytes] = bytes

    def describe(self, leaf: Any) -> LeafSpec | None:
        """The spec of bytes of exactly this type."""
        return LeafSpec(self.kind) if type(leaf) is self.cls else None

    def encode(self, leaf: bytes) -> str:
        """Base64."""
        return _to_base64(bytes(leaf))

    def decode(self, spec: LeafSpec, stored: str) -> bytes:
        """The bytes."""
        del spec
        return self.cls(_from_base64(stored))


class StringArrays:
    """numpy's `StringDType` arrays, as a list of strings. (Those of fixed width are `numpy`.)"""

    def describe(self, leaf: Any) -> LeafSpec | None:
        """The spec of an array of strings without a missing value."""
        if not isinstance(leaf, np.ndarray) or leaf.dtype.kind != "T":
            return None
        return None if hasattr(leaf.dtype, "na_object") else LeafSpec("strings")

    def encode(self, leaf: np.ndarray) -> Any:
        """The shape, the strings in C order, and whether the dtype takes numbers too."""
        strings = [str(s) for s in leaf.reshape(-1)]
        return {"shape": list(leaf.shape), "strings": strings, "coerce": leaf.dtype.coerce}  # type: ignore[attr-defined]

    def decode(self, spec: LeafSpec, stored: Any) -> np.ndarray:
        """The array."""
        del spec
        dtype = np.dtypes.StringDType(coerce=stored["coerce"])
        return np.array(stored["strings"], dtype).reshape(stored["shape"])


def _to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
