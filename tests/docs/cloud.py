"""What pages about buckets need: `gs://bucket`, on a server of this host, until it is closed."""

import contextlib
import os
from unittest import mock

from tests.gcs_server import GcsServer


def opened():
    """The bucket; to be closed at the end of the page."""
    stack = contextlib.ExitStack()
    server = stack.enter_context(GcsServer(("bucket",)))
    stack.enter_context(mock.patch.dict(os.environ, server.env))
    return stack
