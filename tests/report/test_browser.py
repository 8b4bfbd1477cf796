"""The page in a real browser: it renders, fits a phone, is dark where that is asked for, prints, and asks for nothing.

Needs a Chromium or Chrome on the PATH and nothing else. A second page holds the report in a frame as wide as a phone,
measures it and posts what it found; the report itself runs no script.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from leansurgeon.report.collect import collect
from leansurgeon.report.page import page as html_page
from leansurgeon.report.sections import sections
from tests.support.report.report_workspace import workspace

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), None)
pytestmark = pytest.mark.equipped

MEASURE = """<!doctype html><meta charset=utf-8><title>measure</title>
<iframe src="/report.html" style="width:WIDTHpx;height:900px;border:0"></iframe>
<script>
const frame = document.querySelector('iframe');
frame.onload = () => {
  const page = frame.contentDocument, root = page.documentElement, win = frame.contentWindow;
  const style = (node) => win.getComputedStyle(node);
  const wide = [...page.querySelectorAll('body *')].filter((n) => {
    if (n.closest('.scroll') && !n.classList.contains('scroll')) return false;  // scrolls inside its own frame
    const box = n.getBoundingClientRect();
    return box.width > 1 && box.right > win.innerWidth + 1;
  }).map((n) => n.tagName + '.' + n.className);
  const drawings = [...page.querySelectorAll('svg[role=img]')];
  const letters = drawings.flatMap((s) => [...s.querySelectorAll('text')]).map((t) => t.getBoundingClientRect());
  const outside = drawings.flatMap((s) => {
    const box = s.getBoundingClientRect();
    return [...s.querySelectorAll('text')].filter((t) => {
      const b = t.getBoundingClientRect();
      return b.left < box.left - 2 || b.right > box.right + 2 || b.top < box.top - 2 || b.bottom > box.bottom + 2;
    }).map((t) => t.textContent);
  });
  const captions = [...page.querySelectorAll('caption:not(.hidden)')].filter((c) => {
    const words = page.createRange();
    words.selectNodeContents(c);
    return words.getBoundingClientRect().right > win.innerWidth;
  }).map((c) => c.textContent);
  const found = {
    captions, width: win.innerWidth, scroll: root.scrollWidth, height: root.scrollHeight, wide, outside,
    ground: style(page.body).backgroundColor, text: style(page.body).color,
    line: style(page.querySelector('path[stroke="var(--c0)"]')).stroke,
    heading: page.querySelector('h1').textContent, tables: page.querySelectorAll('table').length,
    drawings: drawings.map((s) => s.getBoundingClientRect().height),
    smallest: Math.min(...letters.map((b) => Math.min(b.width, b.height) > 0 ? Math.max(b.height, 0) : 99)),
    row: style(page.querySelector('table.cards tbody tr')).display,
    loaded: win.performance.getEntriesByType('resource').map((e) => e.name),
  };
  fetch('/found', {method: 'POST', body: JSON.stringify(found)});
};
</script>"""


class Site:
    """Serves the report and the page that measures it; keeps what was asked for and what was found."""

    def __init__(self, report: str) -> None:
        self.pages = {"/report.html": report}
        self.asked: list[str] = []
        self.found: dict | None = None
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.asked.append(self.path)
                body = site.pages.get(self.path, "").encode()
                self.send_response(200 if body else 404)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(204)
                self.end_headers()
                site.found = json.loads(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server.server_port}{path}"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    found = collect([workspace(tmp_path_factory.mktemp("runs"))])
    made = Site(html_page.page(sections(found.runs), found))
    yield made
    made.server.shutdown()


def browse(tmp_path: Path, url: str, *flags: str) -> str:
    """Open a page without a window; what the browser says on stderr, where it also logs the console."""
    command = [BROWSER, "--headless=new", "--disable-gpu", "--no-first-run", "--disable-extensions"]
    command += ["--disable-background-networking", "--disable-component-update", "--hide-scrollbars"]
    command += ["--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []  # which root cannot have
    done = subprocess.run(
        [*command, "--virtual-time-budget=20000", *flags, url], capture_output=True, text=True, timeout=240, check=False
    )
    return done.stderr


def measured(site: Site, tmp_path: Path, width: int, *flags: str) -> tuple[dict, str]:
    site.pages["/measure.html"] = MEASURE.replace("WIDTH", str(width))
    site.asked.clear()
    site.found = None
    picture = tmp_path / "page.png"
    said = browse(tmp_path, site.url("/measure.html"), f"--window-size={width},900", f"--screenshot={picture}", *flags)
    assert site.found is not None, f"the browser reported nothing:\n{said[-2000:]}"
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    return site.found, said


def brightness(colour: str) -> float:
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


def fits(found: dict) -> None:
    assert found["scroll"] == found["width"] and not found["wide"], found["wide"]
    assert not found["outside"], found["outside"]  # letters of a drawing that its edge cuts off
    assert not found["captions"], found["captions"]  # a table may be moved in its frame; who does so has read its head


def test_a_phone_in_the_light(site, tmp_path):
    found, said = measured(site, tmp_path, 390)
    assert found["width"] == 390
    fits(found)
    assert found["heading"] == "digits-vit" and found["tables"] >= 6
    assert len(found["drawings"]) >= 6 and min(found["drawings"]) > 60
    assert found["smallest"] >= 9  # letters of a drawing, in pixels
    assert found["row"] == "grid"  # each row a card
    assert brightness(found["ground"]) > 240 > 60 > brightness(found["text"])
    # Nothing was asked for but the two pages, and the console is silent.
    assert set(site.asked) <= {"/measure.html", "/report.html", "/favicon.ico"} and found["loaded"] == []
    assert "CONSOLE" not in said, said


def test_a_wide_screen_in_the_dark(site, tmp_path):
    found, said = measured(site, tmp_path, 1280, "--blink-settings=preferredColorScheme=0")
    fits(found)
    assert found["row"] == "table-row"
    assert brightness(found["ground"]) < 40 and brightness(found["text"]) > 200 and brightness(found["line"]) > 120
    assert "CONSOLE" not in said, said


def test_paper(site, tmp_path):
    file = tmp_path / "page.pdf"
    said = browse(
        tmp_path, site.url("/report.html"), f"--print-to-pdf={file}", "--blink-settings=preferredColorScheme=0"
    )
    assert file.is_file(), said[-2000:]
    content = file.read_bytes()
    assert content[:5] == b"%PDF-" and 2 <= content.count(b"/Type /Page\n") <= 12
