"""Every block of code in README.md and docs/ does what its page says."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import flaxckpt
from flaxckpt.cli.main import COMMANDS, main
from tests.docs.pages import PAGES, ROOT, blocks_of, commands_of

# Shell, output, layouts on disk: nothing that could be run.
NOT_CODE = {"", "text", "json"}
# What is not run, by page: the reasons that are given there.
NOT_RUN = {
    "README.md": ["a bucket"],
    "docs/how-to/preemption.md": ["several processes"],
    "docs/index.md": ["it is the code of the README", "it installs"],
    "docs/processes.md": ["several processes and a bucket"],
    "docs/tutorial.md": ["it installs"],
}
NUMBER = re.compile(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?%?( (B|kB|MB|GB|s|min|h|ms)(/s)?\b)?")


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
    names = {"__name__": "__page__"}
    for block in blocks_of(page.read_text()):
        if block.not_run:
            continue
        if block.title:
            Path(block.title).write_text(block.code)
        elif block.language == "python":
            # The lines of a traceback are those of the page.
            code = "\n" * (block.line - 1) + block.code
            exec(compile(code, page, "exec"), names)
        elif block.language == "console":
            for command, printed in commands_of(block.code):
                capfd.readouterr()
                found = run(shlex.split(command, comments=True), printed, capfd)
                assert not printed or re.fullmatch(
                    pattern_of(printed), shape_of(found), re.DOTALL
                ), found
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


def run(words, printed, capfd):
    """What a command prints; when `Killed` is the end of that, it is."""
    if words[0] == "flaxckpt":
        assert words[1] in {command.name for command in COMMANDS}
        assert main(words[1:]) in (0, 1)
        return capfd.readouterr().out
    assert words[0] == "python"
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    process = subprocess.Popen(
        [sys.executable, *words[1:]],
        env=environment | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    *lines, last = printed.splitlines()
    if last != "Killed":
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        return output
    output = "".join(process.stdout.readline() for _ in lines)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    return f"{output}Killed\n"


def shape_of(printed):
    """What is printed, but for numbers, spaces, and the directory where all of it is."""
    printed = re.sub(r"(?<![\w.])/[\w./-]*/", "/", printed)
    return "\n".join(" ".join(NUMBER.sub("#", line).split()) for line in printed.splitlines())


def pattern_of(printed):
    """What the shape has to be; `...` stands for anything."""
    return ".*".join(map(re.escape, shape_of(printed).split("...")))
