"""The metadata of a step: its times, metrics, items and past."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, cast

import orjson

from flaxckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, InvalidMetricError
from flaxckpt.metadata import sealed_json
from flaxckpt.metadata.sealed_json import SavedFile, check_format, read_json_file
from flaxckpt.store import layout
from flaxckpt.store.layout import CHECKPOINT_METADATA, FORMAT_VERSION, ITEM
from flaxckpt.store.store import Location

# What a step knows of the saves before it, in the `flaxckpt` object of its `_METADATA`.
#
# Nothing is decided by it. It is there so that people can be told of steps that are gone.


# So many saves are remembered.
MAX_PAST = 200


class PastSave(NamedTuple):
    """A save of the same run.

    Attributes:
      step: its step.
      time: when it was committed, in seconds since 1970.
      seconds: from the call until then.
      blocked_seconds: for how long of that the loop waited.
      leaves: how many leaves it has.
      nbytes: the size of its arrays, in bytes.
      metrics: its metrics, but for those that JSON cannot hold.
    """

    step: int
    time: float
    seconds: float
    blocked_seconds: float
    leaves: int
    nbytes: int
    metrics: Mapping[str, float]


def encode_past(past: Iterable[PastSave]) -> list[list[Any]]:
    """As JSON: a list for each save, in the order of the attributes."""
    return [list(save) for save in past]


def decode_past(data: Any) -> tuple[PastSave, ...]:
    """What `encode_past` gave.

    Raises:
      ValueError: when it is something else.
    """
    return tuple(_decode_past(*entry) for entry in data)


def _decode_past(
    step: Any, time: Any, seconds: Any, blocked: Any, leaves: Any, nbytes: Any, metrics: Any
) -> PastSave:
    """One save."""
    values = {str(name): float(value) for name, value in metrics.items()}
    return PastSave(
        int(step), float(time), float(seconds), float(blocked), int(leaves), int(nbytes), values
    )


# What `_CHECKPOINT_METADATA` says of the items that a checkpoint has beside its state.


@dataclasses.dataclass(frozen=True)
class ItemRecord:
    """One item.

    Attributes:
      kind: which handler reads it.
      files: its files, by their names in its directory; those of its tree are in the tree's own
        metadata.
      tree: the directory of its tree within its own, which may be that itself (empty); `None` for
        an item without one.
      details: what else its handler needs.
      orbax: the name of the handler by which Orbax finds its own reader.
    """

    kind: str
    files: Mapping[str, SavedFile]
    tree: str | None
    details: Mapping[str, Any]
    orbax: str


def encode_items(items: Mapping[str, ItemRecord]) -> dict[str, Any]:
    """`items` as JSON; what is empty is left out."""
    return {name: _encode(record) for name, record in items.items()}


def _encode(record: ItemRecord) -> dict[str, Any]:
    """One record as JSON."""
    data: dict[str, Any] = {"kind": record.kind}
    if record.tree is not None:
        data["tree"] = record.tree
    if record.details:
        data["details"] = dict(record.details)
    return data | {"files": [[name, *file] for name, file in record.files.items()]}


def decode_items(data: Mapping[str, Any], orbax: Mapping[str, Any]) -> dict[str, ItemRecord]:
    """The items that `encode_items` wrote; `orbax` names Orbax's readers.

    Raises:
      ValueError: when it is not what that writes, or leads to files elsewhere.
    """
    for name in data:
        if not layout.may_be_item(name) or name == layout.ITEM:
            raise ValueError(f"{name!r} is not the name of an item")
    return {name: _decode_item(item, str(orbax.get(name, ""))) for name, item in data.items()}


def _decode_item(data: Any, orbax: str) -> ItemRecord:
    """The record that `_encode` wrote."""
    tree = data.get("tree")
    if tree not in (None, "", layout.JAX_KEY, layout.NUMPY_KEY):
        raise ValueError(f"{tree!r} is not the directory of a tree")
    files = {name: _file(name, size, crc) for name, size, crc in data["files"]}
    return ItemRecord(str(data["kind"]), files, tree, dict(data.get("details", {})), orbax)


def _file(name: Any, size: Any, crc: Any) -> SavedFile:
    """The size and the checksum of a file."""
    if not (is_file_name(name) and type(size) is int and type(crc) is int and size >= 0):
        raise ValueError(f"no file of an item: {name!r:.80}, {size!r:.80}, {crc!r:.80}")
    return SavedFile(size, crc)


def is_file_name(name: Any) -> bool:
    """Whether `name` is a relative path that stays where it begins."""
    parts = name.split("/") if isinstance(name, str) else [""]
    return all(re.fullmatch(r"(?!\.{1,2}$)[^/\\\0]{1,255}", part) for part in parts)


# `_CHECKPOINT_METADATA`: what is known of a checkpoint beside its tree.
#
# The file has Orbax's members; `custom_metadata` holds the user's, and under `flaxckpt` ours.


# Orbax finds the reader of an item by this name. Only a handler of its v0 API is found by both
# of its APIs.
_ORBAX_HANDLER = (
    "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"
)
_OURS = "flaxckpt"

Mode = Literal["min", "max"]


class Ranking(NamedTuple):
    """The metric that ranks the steps of a run, as its steps record it.

    Attributes:
      metric: its name; `None` for the only metric of a step, whatever its name.
      mode: whether the smallest or the largest value is best.
    """

    metric: str | None
    mode: Mode


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
      ranking: how the run that it is a step of ranks its steps, if that is known.
    """

    attempt: str
    started_ns: int
    committed_ns: int
    metrics: Mapping[str, float]
    metadata: Mapping[str, Any]
    items: Mapping[str, ItemRecord] = dataclasses.field(default_factory=dict)
    ranking: Ranking | None = None


def encode(checkpoint: CheckpointMetadata) -> bytes:
    """The contents of the file."""
    readers = {name: item.orbax for name, item in checkpoint.items.items()}
    items = {"items": encode_items(checkpoint.items)} if checkpoint.items else {}
    ranking = {"ranking": checkpoint.ranking._asdict()} if checkpoint.ranking else {}
    return sealed_json.seal(
        {
            "item_handlers": {ITEM: _ORBAX_HANDLER} | readers,
            "metrics": {
                name: v if math.isfinite(v) else str(v) for name, v in checkpoint.metrics.items()
            },
            "performance_metrics": {},
            "init_timestamp_nsecs": checkpoint.started_ns,
            "commit_timestamp_nsecs": checkpoint.committed_ns,
            "custom_metadata": dict(checkpoint.metadata)
            | {
                _OURS: {"format": FORMAT_VERSION, **items, **ranking, "attempt": checkpoint.attempt}
            },
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
    if (committed_by := path.store.committed_by(path)) is None:
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
            _decode_ranking(ours.get("ranking")),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"{file} is damaged: {type(error).__name__}: {error}. Restore another step."
        ) from None


def _decode_ranking(data: Any) -> Ranking | None:
    if data is None:
        return None
    metric, mode = data["metric"], data["mode"]
    if mode not in ("min", "max") or not isinstance(metric, str | None):
        raise ValueError(f"{data!r:.80} is not a ranking of steps")
    return Ranking(metric, cast(Mode, mode))


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
