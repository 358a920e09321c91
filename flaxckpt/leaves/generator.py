"""numpy's `Generator`: the name of its bit generator, its state, and its seed sequence."""

from __future__ import annotations

from typing import Any

import numpy as np

from flaxckpt.errors import UnsupportedLeafError
from flaxckpt.leaves.spec import LeafSpec

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
        seed = leaf.bit_generator.seed_seq
        seeds = _seed_to_json(seed) if isinstance(seed, np.random.SeedSequence) else None
        return {"state": to_json(leaf.bit_generator.state), "seed": seeds}

    def decode(self, spec: LeafSpec, stored: Any) -> np.random.Generator:
        """A new generator in that state; what it spawns is what the saved one would have."""
        seed = None if stored["seed"] is None else _seed_from_json(stored["seed"])
        bit_generator = BIT_GENERATORS[spec.impl](seed)
        bit_generator.state = from_json(stored["state"])
        return np.random.Generator(bit_generator)


def _seed_to_json(seed: np.random.SeedSequence) -> Any:
    """All that a seed sequence is made of."""
    entropy = seed.entropy
    return {
        "entropy": hex(entropy) if isinstance(entropy, int) else list(map(hex, entropy or ())),
        "spawn_key": list(map(hex, seed.spawn_key)),
        "pool_size": seed.pool_size,
        "n_children_spawned": seed.n_children_spawned,
    }


def _seed_from_json(data: Any) -> np.random.SeedSequence:
    """The seed sequence that `_seed_to_json` wrote."""
    entropy = data["entropy"]
    return np.random.SeedSequence(
        int(entropy, 16) if isinstance(entropy, str) else [int(word, 16) for word in entropy],
        spawn_key=[int(key, 16) for key in data["spawn_key"]],
        pool_size=data["pool_size"],
        n_children_spawned=data["n_children_spawned"],
    )


def to_json(state: Any) -> Any:
    """The state of a bit generator as JSON."""
    match state:
        case dict():
            return {key: to_json(value) for key, value in state.items()}
        case np.ndarray():
            return {"dtype": state.dtype.name, "values": state.tolist()}
        case str():
            return state
    return hex(state)


def from_json(data: Any) -> Any:
    """The state that `to_json` wrote."""
    match data:
        case {"dtype": "uint32" | "uint64" as dtype, "values": list(values)}:
            return np.array(values, dtype)
        case dict():
            return {key: from_json(value) for key, value in data.items()}
    return int(data, 16) if data.startswith(("0x", "-0x")) else data
