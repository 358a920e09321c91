"""Which store a path or a URL is in."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from flaxckpt.options import Options
from flaxckpt.store.bucket import is_url, open_bucket
from flaxckpt.store.local import LocalStore, local_path
from flaxckpt.store.store import Location

if TYPE_CHECKING:
    from etils import epath


def locate(path: epath.PathLike, options: Options) -> Location:
    """What `path` names: a URL (`s3://`, `gs://`), or a path of this machine.

    Raises:
      DirectoryError: when the URL is of another kind, or incomplete.
    """
    if isinstance(path, Location):
        return path
    text = os.fspath(path)
    for scheme in ("gs:/", "s3:/"):  # pathlib makes one slash of two
        if text.startswith(scheme) and not text.startswith(f"{scheme}/"):
            text = f"{scheme}/{text[len(scheme) :]}"
    if is_url(text):
        timeout_secs = min(options.timeout_secs, options.storage.timeout_secs)
        return open_bucket(text, options.storage, timeout_secs)
    return locate_on_disk(text, options)


def locate_on_disk(path: epath.PathLike, options: Options) -> Location:
    """What `path` names on this machine.

    Raises:
      DirectoryError: for a URL.
    """
    store = LocalStore(fsync=options.fsync, can_rename=options.atomic_rename)
    return Location(store, str(local_path(path)).lstrip("/"))
