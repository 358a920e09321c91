"""`_CHECKPOINT_METADATA`: what is known of a checkpoint beside its tree.

The file has Orbax's members; `custom_metadata` holds the user's, and under `flaxckpt` ours.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import orjson

from flaxckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, InvalidMetricError
from flaxckpt.metadata import sealed_json
from flaxckpt.metadata.files import check_format, read_json_file
from flaxckpt.metadata.items import ItemRecord, decode_items, encode_items
from flaxckpt.storage import location
from flaxckpt.storage.layout import CHECKPOINT_METADATA, FORMAT_VERSION, ITEM
from flaxckpt.storage.location import Location

# Orbax finds the reader of an item by this name. Only a handler of its v0 API is found by both
# of its APIs.
_ORBAX_HANDLER = (
    "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"
)
_OURS = "flaxckpt"


@dataclasses.dataclass(frozen=True)
class CheckpointMetadata:
    """What is known of a checkpoint beside its tree.

    Attributes:
      attempt: the id of the save that wrote it.
      started_ns: when the save was called, in nanoseconds since 1970.
      committed_ns: when everything but the commit was done.
      metrics: the user's metrics, as floats.
      metadata: the user's own metadata, as JSON holds it.
      items: what it holds beside the state, by name.
    """

    attempt: str
    started_ns: int
    committed_ns: int
    metrics: Mapping[str, float]
    metadata: Mapping[str, Any]
    items: Mapping[str, ItemRecord] = dataclasses.field(default_factory=dict)


def encode(checkpoint: CheckpointMetadata) -> bytes:
    """The contents of the file."""
    readers = {name: item.orbax for name, item in checkpoint.items.items()}
    items = {"items": encode_items(checkpoint.items)} if checkpoint.items else {}
    return sealed_json.seal(
        {
            "item_handlers": {ITEM: _ORBAX_HANDLER} | readers,
            "metrics": {name: _encode_float(v) for name, v in checkpoint.metrics.items()},
            "performance_metrics": {},
            "init_timestamp_nsecs": checkpoint.started_ns,
            "commit_timestamp_nsecs": checkpoint.committed_ns,
            "custom_metadata": dict(checkpoint.metadata)
            | {_OURS: {"format": FORMAT_VERSION, **items, "attempt": checkpoint.attempt}},
        }
    )


def read(path: Location) -> CheckpointMetadata:
    """The metadata of the checkpoint in the directory `path`.

    Raises:
      CheckpointNotFoundError: when flaxckpt wrote no checkpoint there.
      CorruptCheckpointError: when the file is damaged.
      UnsupportedFormatError: when a newer flaxckpt wrote it.
    """
    file = path / CHECKPOINT_METADATA
    if (committed_by := location.committed_by(path)) is None:
        raise CheckpointNotFoundError(f"{path} is being written, or its save never ended")
    try:
        text = read_json_file(file)
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"{path} holds no checkpoint of flaxckpt") from None
    if b'"flaxckpt":' not in text and not sealed_json.is_sealed(text):
        raise CheckpointNotFoundError(f"the checkpoint at {path} was not written by flaxckpt")
    data = sealed_json.unseal(text, str(file))
    try:
        custom = dict(data["custom_metadata"])
        ours = custom.pop(_OURS)
        check_format(ours, str(file))
        if committed_by not in ("", ours["attempt"]):
            raise CorruptCheckpointError(
                f"the files at {path} are of two different saves ({committed_by} and "
                f"{ours['attempt']}). Restore another step."
            )
        return CheckpointMetadata(
            ours["attempt"],
            int(data["init_timestamp_nsecs"]),
            int(data["commit_timestamp_nsecs"]),
            {name: float(value) for name, value in data["metrics"].items()},
            custom,
            decode_items(ours.get("items", {}), data.get("item_handlers", {})),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"{file} is damaged: {type(error).__name__}: {error}. Restore another step."
        ) from None


def check_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The user's metadata, as JSON will give it back.

    Raises:
      ValueError: when JSON cannot hold it, or it uses a name of ours.
    """
    if _OURS in metadata:
        raise ValueError("the name 'flaxckpt' in metadata is flaxckpt's own. Choose another one.")
    try:
        data: dict[str, Any] = orjson.loads(orjson.dumps(dict(metadata)))
    except TypeError as error:
        raise ValueError(f"metadata must be JSON: {error}") from None
    if data != metadata:
        raise ValueError("metadata must be what JSON can hold exactly: no tuples, no NaN")
    return data


def check_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as Python floats: numbers, numpy and jax scalars are accepted, NaN too.

    Raises:
      InvalidMetricError: for anything else.
    """
    return {name: _as_float(name, value) for name, value in metrics.items()}


def _as_float(name: str, value: Any) -> float:
    """The metric `name` as a float."""
    if not isinstance(name, str):
        raise InvalidMetricError(f"the name of a metric must be a str, got {name!r}. Rename it.")
    if isinstance(value, str | bytes) or getattr(value, "size", 1) != 1:
        raise _no_number(name, value)
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise _no_number(name, value) from None


def _no_number(name: str, value: Any) -> InvalidMetricError:
    """The error of a metric that is none."""
    return InvalidMetricError(
        f"the metric {name!r} must be one number, got {value!r:.80}. Give its mean, or leave it "
        "out."
    )


def _encode_float(value: float) -> float | str:
    """A float as JSON, which has no NaN and no infinities."""
    return value if math.isfinite(value) else str(value)
