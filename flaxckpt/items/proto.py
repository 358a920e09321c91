"""Protocol buffers, in text format. Nothing of them is imported here before the user has."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from flaxckpt.errors import ItemError
from flaxckpt.items.item import Encoded, ProcessRank, SavedItem, about
from flaxckpt.store import layout


class ProtoItems:
    """Messages of any type."""

    def knows(self, value: Any, rank: ProcessRank) -> bool:
        """Without the module there is no message."""
        del rank
        module = sys.modules.get("google.protobuf.message")
        return module is not None and isinstance(value, module.Message)

    def encode(self, value: Any) -> Encoded:
        """The file that Orbax's handler of messages reads when it is given the class."""
        from google.protobuf import text_format

        text = text_format.MessageToString(value)
        try:
            again = text_format.Parse(text, type(value)())
        except text_format.ParseError as error:
            raise ItemError(
                f"it does not survive a text-format round trip: {error}. Register a handler that "
                "saves SerializeToString() (register_item_handler)."
            ) from None
        if _wire(again) != _wire(value):
            raise ItemError(
                "it does not survive a text-format round trip, for example because it has unknown "
                "fields. Register a handler that saves SerializeToString() "
                "(register_item_handler)."
            )
        details = {"message": value.DESCRIPTOR.full_name}
        return Encoded(about("proto") | {layout.PROTO_FILE: text.encode()}, details=details)

    def read(self, saved: SavedItem, target: Any) -> Callable[[], Any]:
        """Needs a message, which is set, or the class of one."""
        from google.protobuf import text_format

        kind, found = saved.detail("message"), getattr(target, "DESCRIPTOR", None)
        if found is None or found.full_name != kind:
            raise ItemError(
                f"the item {saved.name} is a message {kind}. Give an object or the class of that "
                f"as its target, not {target!r:.80}."
            )
        text = saved.file(layout.PROTO_FILE).decode()
        cls = target if isinstance(target, type) else type(target)
        try:
            message = text_format.Parse(text, cls())
        except text_format.ParseError as error:
            raise ItemError(
                f"the item {saved.name} does not fit the message {kind} of this program: {error}. "
                "Restore it with the .proto that it was saved with."
            ) from None
        return lambda: message if isinstance(target, type) else _set(target, message)


def _wire(message: Any) -> bytes:
    """The message as bytes, the same for equal messages."""
    encoded: bytes = message.SerializePartialToString(deterministic=True)
    return encoded


def _set(target: Any, message: Any) -> Any:
    """`target`, which is `message` now."""
    target.CopyFrom(message)
    return target
