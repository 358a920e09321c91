"""Transforms, applied to a checkpoint and to dicts of leaves."""

import numpy as np

from flaxckpt.source.leaf import as_leaf


def state_of(values):
    """A state of leaves that have `values`, by key path."""
    return {name: as_leaf(value, name) for name, value in values.items()}


def values_of(state):
    """The values of a state, arrays as lists."""
    values = {name: leaf.read() for name, leaf in state.items()}
    return {
        n: v.tolist() if isinstance(v, np.ndarray | np.generic) else v for n, v in values.items()
    }


class Costly:
    """A function for `Apply` that counts its calls."""

    def __init__(self):
        self.calls = []

    def __call__(self, path, *arrays):
        self.calls.append(path)
        return sum(arrays)


def refused(path, *arrays):
    """A function for `Apply` that must not be called."""
    raise AssertionError(f"{path} was computed")
