"""What the samples of flax, clu and T5X hold, written down by hand from their bytes."""

from pathlib import Path

import numpy as np

SAMPLES = Path(__file__).parents[1] / "samples"

_KERNELS = {
    "Dense_0": [
        [-0.9546668, 0.4346404],
        [-0.7964443, -0.49291563],
        [0.52981025, 0.7400994],
    ],
    "Dense_1": [
        [0.00066372764, 0.1591259, 0.08940862],
        [-0.42129323, 0.3208943, 0.43588534],
        [-0.55900747, -0.36131096, 0.37186065],
        [0.2389023, 0.21972772, 0.32898405],
    ],
}


def f32(values):
    return np.array(values, np.float32)


def moments(value):
    """A moment of Adam: the same everywhere."""
    shapes = {"Dense_0": (3, 2), "Dense_1": (4, 3)}
    return {
        name: {"bias": f32([value] * shape[1]), "kernel": np.full(shape, value, np.float32)}
        for name, shape in shapes.items()
    }


def opt_state():
    """optax.adamw after one step."""
    adam = {"count": np.array(1, np.int32), "mu": moments(0.1), "nu": moments(0.001)}
    return {"0": adam, "1": {}, "2": {}}


def train_state(step):
    """The TrainState of the samples."""
    params = {
        name: {"bias": f32([-0.0009999934] * len(kernel[0])), "kernel": f32(kernel)}
        for name, kernel in _KERNELS.items()
    }
    return {"step": step, "params": params, "opt_state": opt_state()}
