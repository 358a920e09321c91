"""numpy's random generators, old and new."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from flaxckpt.errors import ItemError
from flaxckpt.items.item import NUMPY_KEY, Encoded, ItemTree, ProcessRank, SavedItem, about
from flaxckpt.leaves import generator
from flaxckpt.leaves.spec import LeafSpec
from flaxckpt.store import layout

_OWN = ".json"


class GeneratorItems:
    """`np.random.Generator`: each process has its own, which may be the same on all."""

    def knows(self, value: Any, rank: ProcessRank) -> bool:
        """See `ItemHandler`."""
        del rank
        return type(value) is np.random.Generator

    def encode(self, value: Any) -> Encoded:
        """A file of each process."""
        made = generator.Generators().encode(value)
        named = {"bit_generator": type(value.bit_generator).__name__, **made}
        return Encoded(about("generator"), {_OWN: json.dumps(named).encode()})

    def read(self, saved: SavedItem, target: Any) -> Callable[[], Any]:
        """Sets a generator over the same bit generator, or makes a new one."""
        stored = json.loads(saved.own(is_shared=True)[_OWN])
        name = str(stored["bit_generator"])
        made = generator.Generators().decode(LeafSpec("generator", impl=name), stored)
        if target is None:
            return lambda: made
        _check_target(saved, target, np.random.Generator, name)
        return lambda: _set(target, made.bit_generator, has_seed=stored["seed"] is not None)


class NumpyKeyItems:
    """`np.random.RandomState` as one process has it, in the way of Orbax."""

    def knows(self, value: Any, rank: ProcessRank) -> bool:
        """Of several processes each may have another one, and only one could be written so."""
        return rank.count == 1 and isinstance(value, np.random.RandomState) and _is_mt(value)

    def encode(self, value: Any) -> Encoded:
        """A tree, and the file that tells Orbax of what kind it is."""
        key = layout.NUMPY_KEY
        files = {f"{key}_metadata/{layout.JSON_FILE}": b'{"legacy": true}'}
        return Encoded(files, tree=ItemTree(key, value.get_state(legacy=True)), orbax=NUMPY_KEY)

    def read(self, saved: SavedItem, target: Any) -> Callable[[], Any]:
        """Sets a `RandomState`, or makes a new one."""
        if target is not None:
            _check_target(saved, target, np.random.RandomState, "MT19937")
        state = saved.tree()
        return lambda: _set_state(np.random.RandomState(0) if target is None else target, state)


class RandomStateItems:
    """`np.random.RandomState` of several processes, or over another bit generator."""

    def knows(self, value: Any, rank: ProcessRank) -> bool:
        """See `ItemHandler`."""
        del rank
        return isinstance(value, np.random.RandomState)

    def encode(self, value: Any) -> Encoded:
        """A file of each process."""
        state: Any = value.get_state(legacy=False)
        if state["bit_generator"] not in generator.BIT_GENERATORS:
            raise ItemError(
                f"its bit generator {state['bit_generator']} is not one of numpy's: "
                f"{', '.join(generator.BIT_GENERATORS)}. Use one of these."
            )
        stored = {"gauss": state.pop("gauss"), "state": generator.to_json(state)}
        return Encoded(about("random_state"), {_OWN: json.dumps(stored).encode()})

    def read(self, saved: SavedItem, target: Any) -> Callable[[], Any]:
        """Sets a `RandomState` over the same bit generator, or makes a new one."""
        stored = json.loads(saved.own(is_shared=True)[_OWN])
        state = generator.from_json(stored["state"]) | {"gauss": float(stored["gauss"])}
        cls = generator.BIT_GENERATORS[state["bit_generator"]]
        if target is None:
            return lambda: _set_state(np.random.RandomState(cls(0)), state)
        _check_target(saved, target, np.random.RandomState, state["bit_generator"])
        return lambda: _set_state(target, state)


def _is_mt(value: np.random.RandomState) -> bool:
    """Whether it is over the bit generator that the old format is for."""
    state: Any = value.get_state(legacy=False)
    return bool(state["bit_generator"] == "MT19937")


def _check_target(saved: SavedItem, target: Any, cls: type, name: str) -> None:
    """Refuses a target that is no `cls` over the bit generator `name`.

    Raises:
      ItemError: in that case.
    """
    found = type(target).__name__
    if isinstance(target, cls):
        bits: Any = getattr(target, "bit_generator", None) or target._bit_generator  # type: ignore[attr-defined]
        if (found := type(bits).__name__) == name:
            return
    raise ItemError(
        f"the item {saved.name} is a numpy {cls.__name__} with bit generator {name}, but its "
        f"target is {found}. Pass None as target and use the new object in `items`."
    )


def _set(target: np.random.Generator, bits: np.random.BitGenerator, *, has_seed: bool) -> Any:
    """`target`, which is where `bits` is now."""
    ours: Any = target.bit_generator
    # The seed sequence, from which generators are spawned, has no other way in.
    seed = bits.seed_seq if has_seed else ours.seed_seq
    ours.__setstate__((bits.state, seed))
    return target


def _set_state(target: np.random.RandomState, state: Any) -> np.random.RandomState:
    """`target`, which has that state now."""
    target.set_state(state)
    return target
