"""The protocol of leaf handlers, how one is found, and how a user adds one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from flaxckpt.errors import CorruptCheckpointError, FlaxckptError, UnsupportedLeafError
from flaxckpt.leaves import conversion
from flaxckpt.leaves.array import JaxArrays, NumpyArrays
from flaxckpt.leaves.generator import Generators
from flaxckpt.leaves.prng_key import PrngKeys
from flaxckpt.leaves.scalar import NumpyScalars, PythonNumbers
from flaxckpt.leaves.spec import LeafInfo, LeafSpec
from flaxckpt.leaves.strings import ByteStrings, StringArrays, Strings


class LeafHandler(Protocol):
    """Turns leaves of some kinds into arrays or JSON, and back."""

    def describe(self, leaf: Any) -> LeafSpec | None:
        """The spec of a leaf or of an abstract one; `None` when the leaf is not of its kinds."""

    def encode(self, leaf: Any) -> jax.Array | np.ndarray | Any:
        """What is stored of a leaf that `describe` knows: an array, or JSON."""

    def decode(self, spec: LeafSpec, stored: Any) -> Any:
        """The leaf of `spec`, from its array (on the device or on the host) or its JSON."""


_BUILTIN: dict[str, LeafHandler] = {
    "jax": JaxArrays(),
    "prng_key": PrngKeys(),
    "numpy": NumpyArrays(),
    "numpy_scalar": NumpyScalars(),
    "bool": PythonNumbers(),
    "int": PythonNumbers(),
    "float": PythonNumbers(),
    "complex": PythonNumbers(),
    "str": Strings(),
    "bytes": ByteStrings(),
    "numpy_str": Strings("numpy_str", np.str_),
    "numpy_bytes": ByteStrings("numpy_bytes", np.bytes_),
    "strings": StringArrays(),
    "generator": Generators(),
}
_REGISTERED: dict[str, LeafHandler] = {}


@dataclasses.dataclass(frozen=True)
class _TypeHandler:
    """The handler of one type of the user's."""

    kind: str
    cls: type
    to_stored: Callable[[Any], Any]
    from_stored: Callable[[Any], Any]

    def describe(self, leaf: Any) -> LeafSpec | None:
        return LeafSpec(self.kind) if isinstance(leaf, self.cls) else None

    def encode(self, leaf: Any) -> Any:
        return self.to_stored(leaf)

    def decode(self, spec: LeafSpec, stored: Any) -> Any:
        del spec
        return self.from_stored(stored)


def register_leaf_handler(
    kind: str, cls: type, encode: Callable[[Any], Any], decode: Callable[[Any], Any]
) -> None:
    """Lets checkpoints hold leaves of the type `cls`.

    Args:
      kind: the name of the type in checkpoints; it must never change.
      cls: the type; subclasses are included.
      encode: makes a numpy array, or something JSON can hold, of a leaf.
      decode: makes the leaf of that again.

    Raises:
      ValueError: when `kind` is one of flaxckpt's own.

    Example:
      >>> import fractions
      >>> flaxckpt.register_leaf_handler("fraction", fractions.Fraction, str, fractions.Fraction)
    """
    if kind in _BUILTIN:
        raise ValueError(f"{kind!r} is a kind of flaxckpt's own. Choose another name.")
    _REGISTERED[kind] = _TypeHandler(kind, cls, encode, decode)


def describe(leaf: Any, name: str) -> tuple[LeafSpec, LeafHandler]:
    """The spec of the leaf at `name`, and its handler.

    Raises:
      UnsupportedLeafError: when no handler knows it.
    """
    if isinstance(leaf, LeafInfo):
        return conversion.canonical(leaf.spec), handler_of(leaf.kind, name)
    for handler in (*_REGISTERED.values(), *_BUILTIN.values()):
        if (spec := handler.describe(leaf)) is not None:
            return spec, handler
    detail = f" of dtype {leaf.dtype}" if isinstance(leaf, np.ndarray | np.generic) else ""
    raise UnsupportedLeafError(
        f"the leaf {name or '(the whole tree)'} is a {type(leaf).__module__}."
        f"{type(leaf).__qualname__}{detail}, which no checkpoint can hold. Take it out of the "
        f"tree, make it static, or call flaxckpt.register_leaf_handler(kind, "
        f"{type(leaf).__name__}, encode, decode)."
    )


def handler_of(kind: str, name: str) -> LeafHandler:
    """The handler that reads leaves of `kind`.

    Raises:
      UnsupportedLeafError: when there is none; `name` is the leaf that asks.
    """
    try:
        return _REGISTERED[kind] if kind in _REGISTERED else _BUILTIN[kind]
    except KeyError:
        raise UnsupportedLeafError(
            f"the leaf {name} was saved by a handler of kind {kind!r}, which is not registered "
            f"here. Call flaxckpt.register_leaf_handler({kind!r}, ...) before restoring."
        ) from None


def encode(leaf: Any, name: str) -> tuple[LeafSpec, Any]:
    """The spec of the leaf at `name` and what is stored of it: an array, or JSON.

    Raises:
      UnsupportedLeafError: when no checkpoint can hold it, or its handler failed.
    """
    spec, handler = describe(leaf, name)
    if isinstance(leaf, LeafInfo):
        raise UnsupportedLeafError(
            f"the leaf {name} is a LeafInfo, which has no value. Save the restored tree instead."
        )
    try:
        return spec, handler.encode(leaf)
    except FlaxckptError as error:
        raise UnsupportedLeafError(f"the leaf {name}: {error}") from None
    except Exception as error:
        raise UnsupportedLeafError(
            f"the leaf {name}: its handler failed: {type(error).__name__}: {error}. Fix the "
            "encode= that register_leaf_handler was given."
        ) from error


def decode(spec: LeafSpec, stored: Any, name: str) -> Any:
    """The leaf of `spec` at `name`, from its array or its JSON.

    Raises:
      UnsupportedLeafError: when no handler here knows its kind.
      CorruptCheckpointError: when it is not what a handler of ours writes.
    """
    handler = handler_of(spec.kind, name)
    if spec.kind in _REGISTERED:
        return handler.decode(spec, stored)
    try:
        return handler.decode(spec, stored)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise CorruptCheckpointError(
            f"the leaf {name} is damaged: the stored value is not a {spec}: {error}. "
            "Restore another step."
        ) from error
