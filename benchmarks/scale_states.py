"""What a save of a large language model consists of, counted: leaves, chunks, transactions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

MIB = 1 << 20
# Of each parameter: bfloat16 params, and float32 master params and two moments of adam.
COPIES = (2, 4, 4, 4)
DEVICES = 8
# The pairs of a sharding and a shape that the matrices have: q, o, k and v, gate and up, down, what
# embeds, the head. Who holds what is worked out once for each. Copies of a parameter share theirs.
MATRIX_PAIRS = 7
# `Options.buffer_bytes`, half of which a transaction has, and `Options.chunk_bytes`.
TRANSACTION_BYTES = 48 * MIB
CHUNK_BYTES = 8 * MIB


class Model(NamedTuple):
    """The sizes of a Llama 3; its key and value heads are 8 of 128."""

    layers: int
    hidden: int
    inner: int
    vocabulary: int = 128_256
    heads: int = 8 * 128

    @property
    def matrices(self) -> list[int]:
        """The parameters of each matrix of a layer: q, o, k, v, gate, up, down."""
        hidden = self.hidden
        attention = [hidden * hidden] * 2 + [hidden * self.heads] * 2
        return attention + [hidden * self.inner] * 3

    @property
    def params(self) -> int:
        """All parameters."""
        layer = sum(self.matrices) + 2 * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden


MODELS = {
    "8B": Model(32, 4096, 14336),
    "70B": Model(80, 8192, 28672),
    "405B": Model(126, 16384, 53248),
}
HOSTS = (8, 64, 512)


class Layout(NamedTuple):
    """How a state is laid out: on so many hosts, its layers in one array or in one each."""

    hosts: int
    scanned: bool
    chunk_bytes: int = CHUNK_BYTES


def arrays(model: Model, scanned: bool) -> Iterator[tuple[int, int, bool]]:
    """The parameters in an array, how many arrays are alike, and whether they are sharded."""
    along, times = (model.layers, 1) if scanned else (1, model.layers)
    for size in model.matrices:
        yield size * along, times, True
    yield model.hidden * along, 2 * times, False  # the scales of two norms
    yield model.hidden, 1, False
    yield model.vocabulary * model.hidden, 2, True  # what embeds, and the head


def count(model: Model, how: Layout) -> dict[str, float]:
    """What a save consists of, where every matrix is spread over all devices."""
    devices = how.hosts * DEVICES
    leaves = entries = stored = 0
    for size, times, is_sharded in arrays(model, how.scanned):
        for itemsize in COPIES:
            holders = devices if is_sharded else 1
            chunks = holders * math.ceil(size * itemsize / holders / how.chunk_bytes)
            leaves += times
            entries += times * (chunks + 1)  # one is the metadata of the array
            stored += times * size * itemsize
    host_bytes = stored / how.hosts
    transaction = max(TRANSACTION_BYTES, how.chunk_bytes)
    transactions = math.ceil(host_bytes / transaction)
    return {
        "leaves": leaves,
        # The scales of norms are replicated; if layers are scanned, the last one has another shape.
        "pairs": MATRIX_PAIRS + (2 if how.scanned else 1),
        "entries": entries,
        "processes": how.hosts,
        "devices": devices,
        "stored": stored,
        "host_bytes": host_bytes,
        "transactions": transactions,
        "rewritten": transactions * (entries - leaves) / how.hosts / 2,
    }
