"""The settings of a save or a restore, and what they refuse."""

from __future__ import annotations

import pytest

import flaxckpt
from flaxckpt.options import BUFFER_BYTES, MIB, MIN_CHUNKS


@pytest.mark.parametrize("least", [1, 8, 1000, MIB])
def test_there_must_be_room_for_four_chunks(least):
    assert flaxckpt.Options(chunk_bytes=least, max_host_bytes=MIN_CHUNKS * least)
    with pytest.raises(
        ValueError, match=rf"max_host_bytes={MIN_CHUNKS * least - 1} is less than 4"
    ):
        flaxckpt.Options(chunk_bytes=least, max_host_bytes=MIN_CHUNKS * least - 1)


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("field", ["chunk_bytes", "max_host_bytes", "timeout_secs"])
def test_sizes_and_timeouts_are_positive(field, value):
    with pytest.raises(ValueError, match=field):
        flaxckpt.Options(**{field: value})


def test_without_a_bound_any_number_of_values_waits():
    assert flaxckpt.Options().snapshot_bytes is None
    assert flaxckpt.Options().buffer_bytes == BUFFER_BYTES


@pytest.mark.parametrize("most", [32 * MIB, 32 * MIB + 1, 100 * MIB, 1000 * MIB])
def test_values_and_encoded_chunks_together_fit_into_the_bound(most):
    options = flaxckpt.Options(max_host_bytes=most)
    assert options.snapshot_bytes + options.buffer_bytes <= most
    assert options.buffer_bytes <= BUFFER_BYTES
    assert options.buffer_bytes >= 2 * options.chunk_bytes
