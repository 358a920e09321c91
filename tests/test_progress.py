"""The bar of long saves and restores: on a terminal only."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import textwrap

import pytest

from flaxckpt import progress
from flaxckpt.progress import Progress
from tests.processes import ROOT, environment

pytestmark = pytest.mark.slow

CODE = """
    import sys, numpy as np, flaxckpt
    from flaxckpt import progress
    progress.AFTER_SECS = float(sys.argv[2])
    options = flaxckpt.Options(progress=sys.argv[3] == "yes", chunk_bytes=1 << 20)
    tree = {f"w{i}": np.zeros(1 << 18, np.float32) for i in range(40)}
    flaxckpt.save(sys.argv[1], tree, options=options)
    flaxckpt.restore(sys.argv[1], options=options)
    print("done")
"""


def on_a_terminal(*args):
    """The exit code and all that the child wrote to its terminal."""
    master, slave = pty.openpty()
    command = [sys.executable, "-c", textwrap.dedent(CODE), *map(str, args)]
    env = environment() | {"TERM": "xterm", "COLUMNS": "120"}
    child = subprocess.Popen(command, stdout=slave, stderr=slave, env=env, cwd=ROOT)
    os.close(slave)
    text = b""
    while True:
        try:
            data = os.read(master, 1 << 16)
        except OSError:  # the child has gone
            break
        if not data:
            break
        text += data
    os.close(master)
    return child.wait(), text.decode()


def test_a_long_save_and_restore_show_a_bar(tmp_path):
    code, text = on_a_terminal(tmp_path / "c", -1, "yes")
    assert code == 0
    assert "saving " in text
    assert "restoring " in text
    assert re.search(r"\d+(\.\d+)?/\d+(\.\d+)? MB", text)
    assert "done" in text


@pytest.mark.parametrize(("after", "shown"), [(60, "yes"), (-1, "no")])
def test_what_is_quick_or_not_wanted_shows_none(after, shown, tmp_path):
    code, text = on_a_terminal(tmp_path / "c", after, shown)
    assert (code, text.strip()) == (0, "done")


def test_a_pipe_gets_none(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(CODE), str(tmp_path / "c"), "-1", "yes"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_all_is_counted_and_the_clock_decides(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    shown = []

    class Bar:
        task_ids = (0,)

        def add_task(self, title, total, completed):
            shown.append((title, total, completed))

        def start(self):
            shown.append("start")

        def update(self, task, completed):
            shown.append(completed)

        def stop(self):
            shown.append("stop")

    monkeypatch.setattr(progress, "progress_bar", Bar)
    with Progress("saving", 10, is_shown=True, clock=lambda: now[0]) as bar:
        for item in bar.counted([1, 2, 3, 4], lambda item: item):
            now[0] += item
    assert shown == [("saving", 10, 3), "start", 6, 10, "stop"]
