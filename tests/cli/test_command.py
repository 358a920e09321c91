"""The command itself: its start, its errors, terminals and pipes."""

import json
import os
import re
import subprocess
import sys
import time

import pytest

import flaxckpt
from flaxckpt.cli import ls, main
from flaxckpt.cli.main import COMMANDS
from tests.cli.shell import on_terminal, run
from tests.processes import ROOT, environment


def test_python_dash_m(made):
    answer = run("ls", made, "--json")
    assert (answer.status, answer.json["latest"]) == (0, 4)
    answer = run("ls", made)
    assert "\x1b" not in answer.out
    assert all(line == line.rstrip() for line in answer.out.splitlines())
    assert run("--version").out == f"flaxckpt {flaxckpt.__version__}\n"


def test_help_names_every_command(shell):
    answer = shell("--help")
    assert answer.status == 0
    assert all(f"  {command} " in answer.out for command in COMMANDS)
    for command in COMMANDS:
        answer = shell(command, "--help")
        assert (answer.status, answer.err) == (0, "")
        assert {"--json", "--endpoint", "--region"} <= set(re.findall(r"--\w+", answer.out))


def test_wrong_usage_is_one_line(shell):
    for args in ([], ["nope"], ["ls"], ["show", "x", "--depth", "0"], ["ls", "x", "--nope"]):
        answer = shell(*args)
        assert (answer.status, answer.out) == (2, "")
        assert re.fullmatch(r"flaxckpt: error: .*\. See flaxckpt.* --help\.\n", answer.err)


def test_errors_are_one_line_also_with_json(shell, tmp_path):
    answer = shell("ls", tmp_path / "none", "--json")
    assert (answer.status, answer.out) == (2, "")
    assert re.fullmatch(r"flaxckpt: error: .*\n", answer.err)
    assert "endpoint must be" in shell.error("ls", tmp_path, "--endpoint", "nope")


def test_what_nobody_expected(shell, monkeypatch, made):
    def failing(*_):
        raise KeyError("boom\nboom")

    monkeypatch.setattr(ls, "run", failing)
    message = shell.error("ls", made)
    assert message == "KeyError: 'boom\\nboom' (unexpected; FLAXCKPT_TRACEBACK=1 shows where)"
    monkeypatch.setenv("FLAXCKPT_TRACEBACK", "1")
    answer = shell("ls", made)
    assert answer.status == 2
    assert "Traceback" in answer.err


def test_interrupted(shell, monkeypatch, made):
    def stopping(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ls, "run", stopping)
    assert shell("ls", made) == (main.INTERRUPTED, "", "flaxckpt: interrupted\n")


def test_a_pipe_that_nobody_reads(made):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "flaxckpt", "show", str(made / "1")]
    done = subprocess.run(
        command, stdout=write, stderr=subprocess.PIPE, env=environment(), cwd=ROOT, timeout=120
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (main.BROKEN_PIPE, b"")


def test_a_terminal(made):
    out = on_terminal(100, "ls", made)
    assert re.search(r"\x1b\[1m *STEP", out)
    narrow = on_terminal(45, "show", made / "2")
    rows = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", r) for r in narrow.splitlines()[3:]]
    assert all(len(row) <= 45 for row in rows)
    assert any("..." in row for row in rows)
    assert rows[0].split()[-1] == "SHARE"


def test_a_bar_on_a_terminal_and_no_colour_when_it_is_not_wanted(made):
    out = on_terminal(100, "verify", made / "1", env={"NO_COLOR": "1"})
    assert "\r" in out or "\x1b[2K" in out
    assert not re.search(r"\x1b\[(3[0-7]|38;|9[0-7])", out)
    assert "ok    " in out


def test_no_device_is_touched_and_nothing_is_imported_that_is_not_used(made):
    code = """
        import sys
        from flaxckpt.cli.main import main
        for args in (["ls"], ["rm", "--keep-last", "1"], ["pin", "1"]):
            assert main([args[0], sys.argv[1], *args[1:]]) == 0
        assert not {"numpy", "tensorstore"} & set(sys.modules), "numpy, TensorStore"
        one = sys.argv[1] + "/1"
        for args in (["show", one], ["diff", one, one]):
            assert main(args) == 0
        assert "jax" not in sys.modules, "jax"
        assert main(["verify", sys.argv[1]]) == 0
        assert main(["cp", sys.argv[1], sys.argv[2]]) == 0
        if "jax" in sys.modules:
            from jax._src import xla_bridge
            assert not xla_bridge.backends_are_initialized(), "device"
    """
    from tests import processes

    status, _, err = processes.run_fresh(code, made, made.parent / "copied")
    assert status == 0, err


@pytest.mark.parametrize("args", [["--help"], ["ls"]])
def test_it_starts_in_half_a_second(args, made, monkeypatch, tmp_path):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))
    call = [*args, made] if args == ["ls"] else args
    run(*call)  # compiles all modules, as an installation does
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        assert run(*call).status == 0
        seconds.append(time.perf_counter() - began)
    if os.getloadavg()[0] > (os.cpu_count() or 1) + 1:
        pytest.skip("others keep this machine busy, so that its times say nothing")
    assert min(seconds) < 0.5


def test_the_documents_are_one_each(made):
    answer = run("verify", made / "1", made / "2", "--json")
    assert len(json.loads(answer.out)["checkpoints"]) == 2
