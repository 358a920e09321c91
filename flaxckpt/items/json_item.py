"""Configurations and other plain data, as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from flaxckpt.errors import ItemError
from flaxckpt.items import exact_json
from flaxckpt.items.encoded import Encoded, Place
from flaxckpt.items.saved import SavedItem
from flaxckpt.storage import layout


class JsonItems:
    """Dicts with str keys, lists, strings, numbers, bools and None; nothing else inside."""

    def knows(self, value: Any, place: Place) -> bool:
        """See `ItemHandler`."""
        del place
        return exact_json.is_plain(value)

    def encode(self, value: Any) -> Encoded:
        """One file, which Orbax reads."""
        try:
            return Encoded({layout.JSON_FILE: exact_json.dumps(value)})
        except ValueError as error:
            raise ItemError(
                f"JSON cannot hold it exactly: {error}. Make it of plain dicts, lists, strings and "
                "finite numbers."
            ) from None

    def read(self, saved: SavedItem, target: Any) -> Callable[[], Any]:
        """A new value; the target is not looked at."""
        del target
        value = json.loads(saved.file(layout.JSON_FILE))
        return lambda: value
