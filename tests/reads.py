"""Counting what is read of data files."""

from flaxckpt.store import ocdbt


class Reads:
    """The reads of data files from now on: how many, and how many bytes."""

    def __init__(self, monkeypatch):
        self._real, self._sizes = ocdbt.read_into, []
        monkeypatch.setattr(ocdbt, "read_into", self._noting)

    def _noting(self, directory, place, buffers):
        self._sizes.append(place.length)
        return self._real(directory, place, buffers)

    @property
    def nbytes(self):
        return sum(self._sizes)

    def of(self, call):
        """How many bytes `call` reads."""
        before = self.nbytes
        call()
        return self.nbytes - before
