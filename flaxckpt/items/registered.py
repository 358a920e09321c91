"""Items of a type that the user has registered a handler for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from flaxckpt.errors import ItemError
from flaxckpt.items.encoded import Encoded, Place, about
from flaxckpt.items.saved import SavedItem
from flaxckpt.metadata.items import is_file_name
from flaxckpt.storage import layout


@dataclasses.dataclass(frozen=True)
class RegisteredItems:
    """The handler of one type of the user's."""

    kind: str
    cls: type
    to_files: Callable[[Any], Mapping[str, bytes]]
    from_files: Callable[[Mapping[str, bytes], Any], Any]

    def knows(self, value: Any, place: Place) -> bool:
        """See `ItemHandler`."""
        del place
        return isinstance(value, self.cls)

    def encode(self, value: Any) -> Encoded:
        """The files that the user's function makes."""
        files = dict(self.to_files(value))
        for name, data in files.items():
            if not is_file_name(name) or not isinstance(data, bytes):
                raise ItemError(
                    f"its handler {self.kind!r} gave a file {name!r:.80} of type "
                    f"{type(data).__name__}. Let it give bytes, by names that are relative paths."
                )
        placed = {f"{layout.USER_FILES}/{name}": data for name, data in files.items()}
        return Encoded(about(self.kind) | placed)

    def read(self, saved: SavedItem, target: Any) -> Callable[[], Any]:
        """The user's function makes the value, when everything else is read."""
        return functools.partial(self.from_files, saved.files(layout.USER_FILES), target)
