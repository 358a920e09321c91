"""A page in a real browser, without a network."""

import functools
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chromium-headless-shell")
_FRAMES = """<!doctype html><meta charset="utf-8"><pre id="found"></pre><script>
const found = {};
onmessage = (event) => {
  found[event.data.asked] = event.data;
  document.getElementById("found").textContent = JSON.stringify(found);
};
</script>"""
_PROBE = """<script>
const errors = [];
addEventListener("error", (event) => errors.push(String(event.message)));
addEventListener("securitypolicyviolation", (event) => errors.push(event.violatedDirective));
const count = (selector) => document.querySelectorAll(selector).length;
function look() {
  if (!document.documentElement.dataset.drawn && !errors.length) return setTimeout(look, 50);
  const marks = Object.fromEntries(Object.entries(SELECTORS).map(([k, s]) => [k, count(s)]));
  const wide = document.documentElement.scrollWidth;
  for (const select of document.querySelectorAll("select")) {
    select.selectedIndex = 1;
    select.dispatchEvent(new Event("change"));
  }
  setTimeout(() => parent.postMessage({
    asked: ASKED, marks, wide, errors, inner: innerWidth,
    text: [...document.querySelectorAll(".plot")].map((plot) => plot.textContent).join(" "),
    colour: getComputedStyle(document.querySelector("#plot-timeline .point")).fill,
    fetched: performance.getEntriesByType("resource").map((entry) => entry.name),
  }, "*"), 200);
}
look();
</script>"""


@functools.cache
def browser():
    """The browser of this machine; the test is skipped where there is none."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    playwright = Path.home() / ".cache" / "ms-playwright"
    found = found or next(map(str, playwright.glob("chromium*/chrome-linux*/*chrom*[!.]")), None)
    if found is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    return found


def run(profile, *arguments):
    """What the browser writes; it reaches no host, and finds nothing of another run."""
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # it does not start as root with one
    fixed = "--headless --disable-gpu --disable-dev-shm-usage --hide-scrollbars --no-first-run"
    offline = ["--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking"]
    command = [browser(), *fixed.split(), *sandbox, *offline, f"--user-data-dir={profile}"]
    return subprocess.run(
        [*command, "--virtual-time-budget=15000", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout


def look(page, widths, selectors):
    """What there is in `page` at each of `widths`: a browser's own window has no narrow ones."""
    frames = _FRAMES
    for width in widths:
        probe = _PROBE.replace("ASKED", str(width)).replace("SELECTORS", json.dumps(selectors))
        copy = page.with_name(f"{width}.html")
        text = page.read_text("utf-8")
        copy.write_text(text.replace("</body>", f"{probe}</body>"), "utf-8")
        frames += (
            f'<iframe src="{copy.name}" style="width:{width}px;height:800px;border:0"></iframe>'
        )
    outer = page.with_name("frames.html")
    outer.write_text(frames, "utf-8")
    dom = run(page.with_name("profile"), "--dump-dom", outer.as_uri())
    found = re.search(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)[1]
    return {int(width): seen for width, seen in json.loads(_unescaped(found) or "{}").items()}


def _unescaped(text):
    """The text of an element."""
    for code, character in (("&lt;", "<"), ("&gt;", ">"), ("&nbsp;", "\xa0"), ("&amp;", "&")):
        text = text.replace(code, character)
    return text


def screenshot(page, image, *, height):
    """The page as a picture, as wide as a small screen."""
    size = f"--window-size=1180,{height}"
    run(page.with_name("profile"), size, f"--screenshot={image}", page.as_uri())
