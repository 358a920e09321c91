"""What is released: a wheel and an sdist that hold all of the package, and nothing else.

They are built from a clean copy, the wheel from the sdist, as `python -m build` does it. Installing
the wheel takes minutes of downloads, so that is `make release-check`, once for all tests: it builds
both as a release does, and goes through the half hour of a new user. That is, it installs the wheel
in an empty environment, runs the README's quick start there, and does what the tutorial says: kill
and resume, look at the run, break a file, change the model.
"""

import contextlib
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from pathlib import Path

import pytest

import flaxckpt

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = f"flaxckpt-{flaxckpt.__version__}"
DATA = {"py.typed", "report/page.css", "report/page.html", "report/page.js"}
BESIDE = {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"}


def copy(to):
    """Copies what belongs to a release to the directory `to`, and some things that do not."""
    ignored = shutil.ignore_patterns("__pycache__", ".*")
    shutil.copytree(ROOT / "flaxckpt", to / "flaxckpt", ignore=ignored)
    for name in (*BESIDE, ".gitignore", "conftest.py"):
        shutil.copy(ROOT / name, to)
    for directory in ("tests", "docs", "flaxckpt/__pycache__"):
        (to / directory).mkdir()
        (to / directory / "test_nothing.py").touch()


def build(source, to, *flags):
    """Builds an sdist, and of that a wheel."""
    command = [sys.executable, "-m", "build", "--outdir", to, *flags, source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    (wheel,), (sdist,) = to.glob("*.whl"), to.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    directory = tmp_path_factory.mktemp("release")
    (directory / "source").mkdir()
    copy(directory / "source")
    # Isolated, it would download the build backend again.
    return directory / "source", *build(directory / "source", directory / "dist", "--no-isolation")


@pytest.fixture
def source(built):
    return built[0]


@pytest.fixture
def wheel(built):
    with zipfile.ZipFile(built[1]) as archive:
        yield archive


def sources(root):
    """The files of the package."""
    found = (p.relative_to(root) for p in (root / "flaxckpt").rglob("*") if p.is_file())
    return {str(path) for path in found if "__pycache__" not in path.parts}


def metadata(wheel):
    return email.message_from_bytes(wheel.read(f"{NAME}.dist-info/METADATA"))


def unspaced(requirement):
    """`requirement` without what is written in several ways: spaces, quotes, capitals, order."""
    text = re.sub(r"[\s\"'()]", "", requirement).lower()
    required, _, marker = text.partition(";")
    name, commas, versions = required.partition(">=")
    return name, commas, versions, marker


def test_the_package_has_only_modules_and_known_data(source):
    other = {name for name in sources(source) if not name.endswith(".py")}
    assert other == {f"flaxckpt/{name}" for name in DATA}


def test_the_names_of_what_is_built(built):
    assert [path.name for path in built[1:]] == [f"{NAME}-py3-none-any.whl", f"{NAME}.tar.gz"]


def test_the_wheel_holds_the_package_and_nothing_else(source, wheel):
    about = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
    assert set(wheel.namelist()) == sources(source) | {f"{NAME}.dist-info/{name}" for name in about}
    assert len(wheel.namelist()) == len(set(wheel.namelist()))


def test_the_files_of_the_wheel_are_those_of_the_package(source, wheel):
    for name in sources(source):
        assert wheel.read(name) == (source / name).read_bytes(), name


def test_the_sdist_holds_what_the_wheel_is_built_from_and_nothing_else(built):
    with tarfile.open(built[2]) as archive:
        found = {member.name for member in archive.getmembers() if member.isfile()}
    beside = BESIDE | {"PKG-INFO", ".gitignore"}
    assert found == {f"{NAME}/{name}" for name in sources(built[0]) | beside}


def test_name_and_version(wheel):
    found = metadata(wheel)
    assert (found["Name"], found["Version"]) == ("flaxckpt", flaxckpt.__version__)
    assert set(found["Requires-Python"].split(",")) == set(PROJECT["requires-python"].split(","))
    assert (found["License-Expression"], found["License-File"]) == ("Apache-2.0", "LICENSE")
    assert found["Summary"] == PROJECT["description"]
    assert found.get_all("Classifier") == PROJECT["classifiers"]
    assert "Root-Is-Purelib: true" in wheel.read(f"{NAME}.dist-info/WHEEL").decode()


def test_dependencies_and_extras(wheel):
    extras = PROJECT["optional-dependencies"]
    expected = {unspaced(line) for line in PROJECT["dependencies"]}
    for extra, lines in extras.items():
        expected |= {unspaced(f"{line}; extra == {extra!r}") for line in lines}
    found = metadata(wheel)
    assert {unspaced(line) for line in found.get_all("Requires-Dist")} == expected
    assert set(found.get_all("Provides-Extra")) == set(extras)


def test_scripts(wheel):
    lines = wheel.read(f"{NAME}.dist-info/entry_points.txt").decode().split("\n")
    assert lines[0] == "[console_scripts]"
    expected = {f"{name} = {place}" for name, place in PROJECT["scripts"].items()}
    assert {line for line in lines[1:] if line} == expected
    for place in PROJECT["scripts"].values():
        module, _, function = place.partition(":")
        code = wheel.read(f"{module.replace('.', '/')}.py").decode()
        assert f"\ndef {function}(" in code


def test_the_description_is_the_readme(source, wheel):
    found = metadata(wheel)
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_payload(decode=True).decode() == (source / "README.md").read_text()


# What the README's quick start takes for granted.
AROUND = """
import jax
mesh = jax.make_mesh((1,), ("data",))
rng = jax.random.key(0)
data = [0.5] * 2001
init_fn = lambda rng: {"w": jax.random.normal(rng, (3,))}
train_step = lambda state, batch: ({"w": state["w"] * batch}, {"loss": 1 - batch})
"""

# The tutorial, and what does what it says.
READ = ["docs/tutorial.md", "tests/__init__.py"]
READ += [f"tests/docs/{name}.py" for name in ("__init__", "pages", "reader")]


def quick_start():
    """The first Python code of the README as a program, which prints the steps it saved."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    return f"{AROUND}{code}print(ckpt.steps())"


def check():
    """Builds a release, and does with its wheel what a new user does."""
    with contextlib.ExitStack() as stack:
        at = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flaxckpt-release-")))
        (at / "source").mkdir()
        copy(at / "source")
        wheel, _ = timed("built", lambda: build(at / "source", at / "dist"))
        run = subprocess.check_call
        timed("made an environment", lambda: run([sys.executable, "-m", "venv", at / "fresh"]))
        bin_ = at / "fresh" / "bin"
        timed("installed", lambda: run([bin_ / "pip", "install", "--quiet", f"{wheel}[report]"]))
        run([bin_ / "pip", "check"])
        # `-I` and another directory: this one is not to be imported.
        how = {"cwd": at, "env": os.environ | {"JAX_PLATFORMS": "cpu"}}
        for _ in range(2):
            code = [bin_ / "python", "-I", "-W", "error", "-c", quick_start()]
            timed("ran the quick start", lambda code=code: run(code, **how))
        run([bin_ / "flaxckpt", "ls", "runs/mnist"], **how)
        run([bin_ / "flaxckpt", "verify", "runs/mnist"], **how)
        for page in READ:
            (at / page).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / page, at / page)
        run([bin_ / "python", "-m", "tests.docs.reader", "docs/tutorial.md"], **how)


def timed(what, function):
    """Calls `function`, and says how long it took."""
    started = time.monotonic()
    result = function()
    print(f"{what} in {time.monotonic() - started:.1f} s", flush=True)
    return result


if __name__ == "__main__":
    check()
