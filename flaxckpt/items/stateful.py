"""Objects that know their own state, above all the iterators of input pipelines.

Each process has its own: with several, each reads another part of the data.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from etils import epath

from flaxckpt.errors import ItemError
from flaxckpt.items import json_item
from flaxckpt.items.item import Encoded, ProcessRank, SavedItem, about

# How an object is asked for its state, and how it is given one.
_BY_VALUE = {"get_state": "set_state", "state_dict": "load_state_dict"}
_BY_PATH = ("restore", "load")
_SAVE = "save"
# The path that `save` is given, in a directory of its own.
_NAME = "state"
_SUFFIXES = {"json": ".json", "str": ".txt", "bytes": ".bin"}


class StatefulItems:
    """Objects with `get_state`, `state_dict` or `save`, and with what sets it again."""

    def knows(self, value: Any, rank: ProcessRank) -> bool:
        """See `ItemHandler`."""
        del rank
        return _protocol(value) is not None

    def encode(self, value: Any) -> Encoded:
        """Files of each process."""
        protocol = _protocol(value)
        assert protocol is not None, "it was asked for"
        if protocol == _SAVE:
            files = {f"/{name}": data for name, data in _saved_files(value).items()}
            return Encoded(about("stateful"), files, {"protocol": protocol})
        form, data = _encoded(getattr(value, protocol)(), protocol)
        # grain's own handler for Orbax looks for this name.
        suffix = ".json" if _is_json(data) else _SUFFIXES[form]
        details = {"protocol": protocol, "form": form}
        return Encoded(about("stateful"), {suffix: data}, details)

    def read(self, saved: SavedItem, target: Any) -> Callable[[], Any]:
        """Sets the target; without one, gives the state itself, where that is a value."""
        protocol, files = saved.detail("protocol"), saved.own()
        _check_target(saved, target, protocol)
        if protocol == _SAVE:
            return functools.partial(_restore_files, target, files)
        (data,) = files.values()
        state = _decoded(saved.detail("form"), data)
        return lambda: state if target is None else _set(target, _BY_VALUE[protocol], state)


def _protocol(value: Any) -> str | None:
    """The method that gives the state of `value`; `None` when it has none that can be set."""
    if isinstance(value, type):
        return None
    for get, put in _BY_VALUE.items():
        if _has(value, get) and _has(value, put):
            return get
    return _SAVE if _has(value, _SAVE) and any(_has(value, n) for n in _BY_PATH) else None


def _has(value: Any, name: str) -> bool:
    """Whether `value` has a method of that name."""
    return callable(getattr(value, name, None))


def _encoded(state: Any, protocol: str) -> tuple[str, bytes]:
    """A state as bytes, and how that is to be read.

    Raises:
      ItemError: when it is neither bytes nor a string nor JSON.
    """
    if isinstance(state, bytes):
        return "bytes", state
    if type(state) is str:
        return "str", state.encode("utf-8", "surrogatepass")
    try:
        return "json", json_item.dumps(state)
    except ValueError as error:
        raise ItemError(
            f"its {protocol}() result does not survive a JSON round trip: {error}. Return bytes, a "
            "str, or plain dicts, lists and numbers; or call flaxckpt.register_item_handler."
        ) from None


def _decoded(form: str, data: bytes) -> Any:
    """The state that `_encoded` wrote."""
    if form == "json":
        return json.loads(data)
    return data if form == "bytes" else data.decode("utf-8", "surrogatepass")


def _is_json(data: bytes) -> bool:
    """Whether `data` happens to be JSON."""
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


def _saved_files(value: Any) -> dict[str, bytes]:
    """The files that `value.save(path)` writes, by their names.

    Raises:
      ItemError: when there are none, or none there: its state would be lost.
    """
    with tempfile.TemporaryDirectory(prefix="flaxckpt-") as directory:
        value.save(epath.Path(directory) / _NAME)
        paths = [path for path in sorted(Path(directory).rglob("*")) if path.is_file()]
        files = {str(path.relative_to(directory)): path.read_bytes() for path in paths}
    if not files:
        raise ItemError("its save(path) wrote nothing. A TfDatasetIterator needs checkpoint=True.")
    if not any(name.startswith((f"{_NAME}/", f"{_NAME}.")) or name == _NAME for name in files):
        raise ItemError(  # tf.train.Checkpoint, for one, puts a number behind it
            f"its save(path) wrote {', '.join(files)}, and nothing under the name it was given, "
            f"{_NAME}, so it would not find it again. Call flaxckpt.register_item_handler."
        )
    return files


def _restore_files(target: Any, files: Mapping[str, bytes]) -> Any:
    """`target`, after it has read the files that `_saved_files` found."""
    with tempfile.TemporaryDirectory(prefix="flaxckpt-") as directory:
        for name, data in files.items():
            path = Path(directory) / name.removeprefix("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        method = next(name for name in _BY_PATH if _has(target, name))
        getattr(target, method)(epath.Path(directory) / _NAME)
    return target


def _check_target(saved: SavedItem, target: Any, protocol: str) -> None:
    """Refuses a target that cannot be given the state.

    Raises:
      ItemError: in that case.
    """
    names = (_BY_VALUE[protocol],) if protocol in _BY_VALUE else _BY_PATH
    is_given = target is not None and any(_has(target, name) for name in names)
    if is_given or (target is None and protocol in _BY_VALUE):
        return
    raise ItemError(
        f"the item {saved.name} is the state of an object, and its target {target!r:.80} has no "
        f"{' or '.join(names)}. Pass an object like the saved one."
    )


def _set(target: Any, method: str, state: Any) -> Any:
    """`target`, which has that state now."""
    getattr(target, method)(state)
    return target
