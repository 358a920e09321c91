"""Every block of code in README.md and docs/ does what its page says."""

import re
import sys

import pytest

import flaxckpt
from flaxckpt.cli.main import COMMANDS, main
from tests.docs import reader
from tests.docs.pages import PAGES, ROOT, blocks_of

# Shell, output, layouts on disk: nothing that could be run.
NOT_CODE = {"", "text", "json"}
# What is not run, by page: the reasons that are given there.
NOT_RUN = {
    "docs/index.md": ["it is the code of the README", "it installs"],
    "docs/tutorial.md": ["it installs"],
}


def name_of(page):
    """A page as it is called here."""
    return str(page.relative_to(ROOT))


@pytest.fixture
def no_tensorflow(monkeypatch):
    """Spares half of the time that all pages take, unless somebody has imported it."""
    if "tensorflow" in sys.modules or "flaxckpt.periodic" in sys.modules:
        yield
        return
    monkeypatch.setitem(sys.modules, "clu.periodic_actions", None)
    yield
    sys.modules.pop("flaxckpt.periodic", None)
    vars(flaxckpt).pop("PeriodicCheckpoint", None)


@pytest.mark.usefixtures("no_tensorflow")
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks(page, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    modules = set(sys.modules)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HOME", str(tmp_path))

    def shell(arguments):
        capfd.readouterr()
        assert arguments[0] in COMMANDS
        assert main(arguments) in (0, 1)
        return capfd.readouterr().out

    reader.read(page, shell)
    for module in set(sys.modules) - modules:
        if getattr(sys.modules[module], "__file__", None) == str(tmp_path / f"{module}.py"):
            del sys.modules[module]


def test_what_is_not_run_is_listed():
    found = {
        name_of(page): [block.not_run for block in blocks_of(page.read_text()) if block.not_run]
        for page in PAGES
    }
    assert {page: reasons for page, reasons in found.items() if reasons} == NOT_RUN


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_language_is_known(page):
    text = page.read_text()
    assert {block.language for block in blocks_of(text)} <= {"python", "console", *NOT_CODE}
    fences = re.findall(r"^ *```", text, re.MULTILINE)
    assert len(fences) == 2 * sum(not block.is_hidden for block in blocks_of(text))


def test_the_first_page_has_the_code_of_the_readme():
    first = [
        next(block.code for block in blocks_of(page.read_text()) if "enumerate(data" in block.code)
        for page in (ROOT / "README.md", ROOT / "docs" / "index.md")
    ]
    assert first[0] == first[1]
