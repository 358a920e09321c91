"""The places where runs can be, for tests that are to hold in all of them."""

import contextlib
import os
import re
from unittest import mock

import tensorstore as ts

import flaxckpt
from flaxckpt import ObjectStore, Options
from flaxckpt.store import layout
from flaxckpt.store.locate import locate
from tests.gcs_server import GcsServer
from tests.s3_server import S3Server

BUCKETS = ["s3", "gcs"]
ALL = ["disk", *BUCKETS]

_CHILD = re.compile(rf"(.+)/{layout.ITEM}/{layout.CHILD}\d+-([0-9a-f]+)/.*")


def at(path, **settings):
    """The location of `path` on this machine, for functions that get no path of the user's."""
    return locate(path, Options(**settings))


class Disk:
    """A directory."""

    def __init__(self, root):
        self._root = root
        self.env = {}

    def url(self, run):
        """The run of that name."""
        return str(self._root / run)

    def options(self, **settings):
        """What managers and functions are given."""
        return Options(**settings)

    def strays(self, run):
        """What is there and belongs to no committed step."""
        return sorted(set(os.listdir(self._root / run)) - set(map(str, _steps(self, run))))


class Bucket:
    """A bucket of a server on this host."""

    def __init__(self, scheme, server):
        self._scheme, self.server = scheme, server
        self.env = dict(server.env)

    def url(self, run):
        """The run of that name."""
        return f"{self._scheme}://bkt/{run}"

    def options(self, *, retries=3, **settings):
        """What managers and functions are given."""
        store = ObjectStore(retries=retries)
        if self._scheme == "s3":
            store = ObjectStore(self.server.endpoint, "us-east-1", "environment", retries)
        return Options(storage=store, **settings)

    def kvstore(self, run):
        """All objects of a run, to TensorStore."""
        return ts.KvStore.open(self.server.spec(f"{run}/")).result()

    def objects(self, run):
        """The names of all objects of a run."""
        return [key.decode() for key in self.kvstore(run).list().result()]

    def read(self, run, name):
        """An object of a run; `None` when there is none."""
        found = self.kvstore(run).read(name).result()
        return None if found.state == "missing" else found.value

    def write(self, run, name, data):
        """Puts an object into a run; with `None`, removes it."""
        self.kvstore(run).write(name, data).result()

    def strays(self, run):
        """What is there and belongs to no committed step, or to another attempt to write it."""
        names = self.objects(run)
        steps = {str(step) for step in _steps(self, run)}
        ours = {f"{layout.CLAIMS}/{step}" for step in steps}
        markers = {step: self.read(run, f"{step}/{layout.COMMIT_SUCCESS}") for step in steps}
        claims = {step: self.read(run, f"{layout.CLAIMS}/{step}") for step in steps}
        found = {name for name in names if name not in ours and name.split("/")[0] not in steps}
        for name in names:
            if (child := _CHILD.fullmatch(name)) and markers.get(child[1]) != child[2].encode():
                found.add(name)
        for step in steps:
            if claims[step] != markers[step] + b" committed":
                found.add(f"{step} has another claim than its marker")
        return sorted(found)


def _steps(store, run):
    """The committed steps."""
    return flaxckpt.CheckpointManager(
        store.url(run), options=store.options(), read_only=True
    ).steps()


@contextlib.contextmanager
def opened(name, root):
    """The place called `name`; this process can reach it too."""
    if name == "disk":
        yield Disk(root)
        return
    scheme, kind = {"s3": ("s3", S3Server), "gcs": ("gs", GcsServer)}[name]
    with kind() as server, mock.patch.dict(os.environ, server.env):
        yield Bucket(scheme, server)
