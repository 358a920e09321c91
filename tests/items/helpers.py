"""Saving and restoring one item, for the tests of each kind."""

import flaxckpt
from flaxckpt import Options

OPTIONS = Options(fsync=False)


def saved(path, **items):
    """A checkpoint at `path` with these items, which verifies."""
    flaxckpt.save(path, {"step": 7}, items=items, overwrite=True, options=OPTIONS)
    report = flaxckpt.verify(path)
    assert report, report.problems
    assert flaxckpt.restore(path) == {"step": 7}
    return path


def again(path, value, target=None):
    """`value` after it was saved and restored."""
    return flaxckpt.restore_items(saved(path, it=value), {"it": target})["it"]
