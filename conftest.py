"""What the examples in docstrings may use without importing it."""

import pytest


@pytest.fixture(autouse=True)
def _doctest_names(request: pytest.FixtureRequest) -> None:
    """Puts `flaxckpt` and `tmp_path` into the namespace of every docstring."""
    if "doctest_namespace" in request.fixturenames or isinstance(request.node, pytest.DoctestItem):
        import flaxckpt

        names = request.getfixturevalue("doctest_namespace")
        names["flaxckpt"] = flaxckpt
        names["tmp_path"] = request.getfixturevalue("tmp_path")
