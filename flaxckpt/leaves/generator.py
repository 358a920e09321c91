"""numpy's `Generator`: the name of its bit generator and the state of that."""

from __future__ import annotations

from typing import Any

import numpy as np

from flaxckpt.errors import UnsupportedLeafError
from flaxckpt.leaves.record import LeafSpec

# The bit generators that a reader may create.
BIT_GENERATORS = {
    cls.__name__: cls
    for cls in (
        np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64
    )
}  # fmt: skip


class Generators:
    """`np.random.Generator` over one of numpy's own bit generators."""

    def describe(self, leaf: Any) -> LeafSpec | None:
        """The spec of a generator."""
        if type(leaf) is not np.random.Generator:
            return None
        return LeafSpec("generator", impl=type(leaf.bit_generator).__name__)

    def encode(self, leaf: np.random.Generator) -> Any:
        """The state as JSON: large ints in hexadecimal, arrays as lists."""
        if type(leaf.bit_generator) not in BIT_GENERATORS.values():
            raise UnsupportedLeafError(
                f"its bit generator {type(leaf.bit_generator).__name__} is not one of numpy's: "
                f"{', '.join(BIT_GENERATORS)}. Use one of these."
            )
        return _to_json(leaf.bit_generator.state)

    def decode(self, spec: LeafSpec, stored: Any) -> np.random.Generator:
        """A new generator in that state."""
        bit_generator = BIT_GENERATORS[spec.impl]()
        bit_generator.state = _from_json(stored)
        return np.random.Generator(bit_generator)


def _to_json(state: Any) -> Any:
    match state:
        case dict():
            return {key: _to_json(value) for key, value in state.items()}
        case np.ndarray():
            return {"dtype": state.dtype.name, "values": state.tolist()}
        case str():
            return state
    return hex(state)


def _from_json(data: Any) -> Any:
    match data:
        case {"dtype": "uint32" | "uint64" as dtype, "values": list(values)}:
            return np.array(values, dtype)
        case dict():
            return {key: _from_json(value) for key, value in data.items()}
    return int(data, 16) if data.startswith(("0x", "-0x")) else data
