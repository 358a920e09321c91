"""The site can be built, and none of its links leads nowhere."""

import importlib.util
import subprocess
import sys

import pytest

import flaxckpt
from tests.docs.pages import ROOT

needs_mkdocs = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("material", "mkdocs", "mkdocstrings_handlers"))),
    reason="the site needs mkdocs-material and mkdocstrings[python]",
)


def test_the_reference_has_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text().splitlines()
    assert {f"::: flaxckpt.{name}" for name in flaxckpt.__all__} <= set(page)


@needs_mkdocs
def test_the_site_is_built_without_a_warning(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "site" / "api" / "index.html").read_text()
    assert "on_corrupt" in api
    assert "<!-- setup" not in (tmp_path / "site" / "index.html").read_text()
