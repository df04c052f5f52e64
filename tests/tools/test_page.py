"""The page, in a real browser: its numbers move, it asks before it changes anything, and its five states are drawn.

Screenshots go to ``build/screenshots``: look at them after a change.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.kv import HostKV

pytest.importorskip("fastapi")
pytest.importorskip("playwright")
from playwright.sync_api import sync_playwright
from served import TOKEN, Served, serving

ROOT = Path(__file__).resolve().parents[2]
SHOTS = ROOT / "build" / "screenshots"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no browser: apt-get install chromium")

ENGINE = """
import sys, time, numpy as np, kvstore
from kvstore.kv import HostKV
from kvstore.layout import Layout
layout = Layout.uniform(layers=2, heads=2, k_dim=16, block_tokens=16)
kv = lambda length: HostKV.stacked(layout, np.zeros((2, 2, 2, length, 16), np.uint32))
with kvstore.open(sys.argv[1], ram="8MiB", nvme="16MiB") as store:
    space = store.namespace(layout, salt="engine", label="engine")
    for turn in range(1, 500):
        ids = [7, *range(1000, 1000 + 20 * turn)][:2000]
        match = store.match(space, ids, limit=len(ids) - 1)
        store.load(match, kv(max(1, match.tokens)))
        store.save(space, ids, kv(len(ids)))
        print(turn, flush=True)
        time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def served(made: Any) -> Iterator[Served]:
    with serving(made.path) as server:
        yield server


class Seen:
    """A page in a browser, and all that it asked for and complained of."""

    def __init__(
        self, browser: Any, url: str, *, width: int = 1400, dark: bool = False, token: str | None = TOKEN
    ) -> None:
        height = 900 if width > 500 else 860
        theme = "dark" if dark else "light"
        self.context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
        self.page = self.context.new_page()
        self.page.set_default_timeout(30_000)
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type != "log" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(url + (f"/#token={token}" if token else "/"))

    def __enter__(self) -> Seen:
        return self

    def __exit__(self, *error: object) -> None:
        self.context.close()

    def live(self) -> Seen:
        """Once looks come and the table is there."""
        self.page.wait_for_selector("body[data-link=live]")
        self.page.wait_for_selector("#rows tr")
        return self

    def text(self, selector: str) -> str:
        """What an element says."""
        return str(self.page.inner_text(selector))

    def until(self, selector: str, says: str) -> None:
        """Wait until an element's text fits a pattern."""
        self.page.wait_for_function(
            "([where, what]) => new RegExp(what).test(document.querySelector(where)?.innerText ?? '')",
            arg=[selector, says],
        )

    def keep(self, name: str) -> None:
        """A screenshot of the whole page; nothing of it may be wider than the window."""
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SHOTS / f"{name}.png", full_page=True)
        wide = self.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide[0] <= wide[1], name


def fill(store: Any, layout: Any, label: str, first: int, length: int) -> None:
    ids = [first, *range(3000, 3000 + length - 1)]
    kv = HostKV.stacked(layout, np.zeros((2, 2, 2, length, 16), np.uint32))
    store.save(store.namespace(layout, salt=label, label=label), ids, kv)


def test_live_numbers_move_while_another_process_saves_and_resumes(made: Any, served: Served, browser: Any) -> None:
    line = [sys.executable, "-c", ENGINE, str(made.path)]
    with Seen(browser, served.url).live() as seen:
        assert seen.text("#served") == "0"
        assert seen.text("#engine-list").count("pid") == 1
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, cwd=ROOT) as engine:
            try:
                seen.until("#served", r"[1-9]\d\d")
                first = int(seen.text("#served").replace(",", ""))
                seen.page.wait_for_function(
                    "was => Number(document.querySelector('#served').innerText.replace(/,/g, '')) > was", arg=first
                )
                seen.until("#tokens-chart .legend", "from ram")
                seen.until("#bandwidth-chart .legend", "save to ram")
                seen.until("#engine-list", r"pid[\s\S]*pid")
                seen.until("#rows", "engine")
                assert seen.page.get_attribute("body", "data-state") in ("busy", "quiet")
                seen.page.wait_for_selector("body[data-state=busy]")
                label = seen.page.get_attribute("#tokens-chart svg", "aria-label")
                assert re.search(r"from ram [\d,.]+", label or "")
                seen.keep("busy-1400-light")
            finally:
                engine.kill()
                engine.communicate()
        assert "%" in seen.text("#rate")
        assert seen.complaints == []


def test_pin_asks_for_a_name_and_unpin_asks_first(served: Served, browser: Any) -> None:
    with Seen(browser, served.url).live() as seen:
        page = seen.page
        page.click("[data-sort=biggest]")
        seen.until("#rows tr:first-child", "64")
        page.click("#rows tr:first-child button:text('Pin')")
        assert page.is_visible("dialog[open]")
        assert page.evaluate("document.activeElement.name") == "name"
        seen.keep("dialog-pin")
        page.keyboard.press("Escape")
        page.wait_for_selector("dialog:not([open])", state="hidden")
        assert {one["name"] for one in served.get("/v1/names")["names"]} == {"greeting"}
        page.click("#rows tr:first-child button:text('Pin')")
        page.fill("dialog input[name=name]", "<b>rules & more</b>")
        page.select_option("dialog select", "3600")
        page.keyboard.press("Enter")
        seen.until("#said", "Pinned 64 tokens")
        seen.until("#rows tr:first-child", "<b>rules & more</b>")
        named = {one["name"]: one for one in served.get("/v1/names")["names"]}
        assert named["<b>rules & more</b>"]["expires"] - named["<b>rules & more</b>"]["created"] == 3600
        page.click("button[aria-label='Unpin greeting']")
        seen.until("#ask-h", "greeting")
        page.click("#ask-no")
        assert "greeting" in {one["name"] for one in served.get("/v1/names")["names"]}
        page.click("button[aria-label='Unpin greeting']")
        page.click("#ask-yes")
        seen.until("#said", "Forgot “greeting”")
        assert "greeting" not in {one["name"] for one in served.get("/v1/names")["names"]}
        assert seen.complaints == []


def test_evict_counts_and_asks_first(made: Any, served: Served, browser: Any) -> None:
    with Seen(browser, served.url).live() as seen:
        page = seen.page
        page.fill("#search", "second")
        seen.until("#page-text", "of 2")
        page.click("[data-sort=biggest]")
        seen.until("#rows tr:first-child", "64")
        page.click("#rows tr:first-child button:text('Evict')")
        seen.until("#ask-text", "4 blocks of ram and 4 blocks of nvme")
        assert page.evaluate("document.activeElement.id") == "ask-no", "the safe answer is the one that Enter gives"
        seen.keep("dialog-evict")
        page.keyboard.press("Enter")
        page.wait_for_selector("dialog:not([open])", state="hidden")
        assert made.held("second", 64) == {"ram": 64}
        page.click("#rows tr:first-child button:text('Evict')")
        page.click("#ask-yes")
        seen.until("#said", "Evicted 4 blocks of ram")
        seen.until("#page-text", "of 1")
        assert made.held("second", 64) == {}
        assert made.held("first", 40) == {"ram": 40}
        assert seen.complaints == []


def test_an_empty_store_says_how_to_fill_it(tmp_path: Path, browser: Any) -> None:
    kvstore.open(tmp_path / "new", ram="8MiB", nvme="16MiB").close()
    with serving(tmp_path / "new") as served, Seen(browser, served.url).live() as seen:
        seen.page.wait_for_selector("#empty:visible")
        assert "kvstore warm" in seen.text("#empty")
        assert "Nothing is stored yet" in seen.text("#rows")
        assert seen.text("#rate") == "–"
        seen.keep("empty-1400-light")
        assert seen.complaints == []


def test_a_server_that_is_gone_is_said_and_found_again(made: Any, browser: Any) -> None:
    with ExitStack() as held:
        with serving(made.path) as served:
            seen = held.enter_context(Seen(browser, served.url, dark=True)).live()
            seen.until("#tier-list", "nvme")
        seen.page.wait_for_selector("#lost:visible")
        seen.until("#link", "No answer")
        assert "nvme" in seen.text("#tier-list"), "what was known stays on the page"
        seen.keep("disconnected-1400-dark")
        with serving(made.path, port=served.port):
            seen.page.wait_for_selector("body[data-link=live]")
            assert not seen.page.is_visible("#lost")


@pytest.mark.parametrize("token", [None, TOKEN])
def test_who_has_no_token_reads(made: Any, browser: Any, token: str | None) -> None:
    with serving(made.path, token) as served, Seen(browser, served.url, token=None).live() as seen:
        page = seen.page
        assert page.is_visible("#read-only")
        assert page.locator("#rows button:enabled").count() == 0
        if token is None:
            assert "started without a token" in seen.text("#read-only")
            assert not page.is_visible("#lock")
            seen.keep("read-only-1400-light")
            return
        page.click("#lock")
        page.fill("dialog input", "not the token, but as long")
        page.click("#ask-yes")
        seen.until("#ask-problem", "not the token")
        page.fill("dialog input", TOKEN)
        page.click("#ask-yes")
        page.wait_for_selector("body[data-may=true]")
        page.wait_for_selector("#rows button:enabled")
        page.reload()
        page.wait_for_selector("#rows button:enabled")
        page.click("#lock")
        page.wait_for_selector("body[data-may=false]")


def test_a_server_for_others_asks_for_the_token_first(made: Any, browser: Any) -> None:
    with serving(made.path, host="0.0.0.0") as served, Seen(browser, served.url, token=None) as seen:
        seen.page.wait_for_selector("dialog[open]")
        assert seen.text("#rows") == ""
        seen.page.fill("dialog input", TOKEN)
        seen.page.click("#ask-yes")
        seen.live()


@pytest.mark.parametrize(("width", "dark"), [(400, False), (400, True), (1400, True), (2560, False)])
def test_pressure_is_told_at_every_width_in_both_themes(made: Any, browser: Any, width: int, dark: bool) -> None:
    with serving(made.path) as served:
        for first in range(40):
            fill(
                served.store, made.layout, "first" if first % 2 else "a label that goes on for rather long", first, 240
            )
        with Seen(browser, served.url, width=width, dark=dark).live() as seen:
            fill(served.store, made.layout, "first", 99, 240)
            seen.until("#sentences", r"ram is full: \d+ blocks? had to make room")
            assert seen.page.locator("#sentences li.warn").count() > 0
            assert seen.page.locator(".tier.full").count() > 0
            seen.keep(f"pressure-{width}-{'dark' if dark else 'light'}")
            assert seen.page.evaluate(POOR_CONTRAST) == []
            assert seen.complaints == []


POOR_CONTRAST = """() => {
    const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
    const linear = (c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
    const ground = (node) => {
        for (let at = node; at; at = at.parentElement) {
            const colour = parse(getComputedStyle(at).backgroundColor);
            if (colour.length === 3 || colour[3] > 0.5) return colour;
        }
        return [255, 255, 255];
    };
    const shown = (node) => node.checkVisibility() && !node.closest("[disabled], svg, .hidden, .skip");
    const own = (node) => [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    const ratio = (node) => {
        const both = [light(parse(getComputedStyle(node).color)), light(ground(node))];
        return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
    };
    const nodes = [...document.querySelectorAll("body *")].filter((node) => own(node) && shown(node));
    return nodes.filter((node) => ratio(node) < 4.5).map((node) => `${node.outerHTML.slice(0, 80)} ${ratio(node)}`);
}"""
"""Texts that stand out from their ground by less than 4.5 to 1."""
NAMELESS = """() => [...document.querySelectorAll("button, input, select, svg[role], [role=meter], section")]
    .filter((one) => one.checkVisibility() && !one.innerText?.trim() && !one.labels?.[0]?.innerText.trim())
    .filter((one) => !one.getAttribute("aria-label") && !one.getAttribute("aria-labelledby"))
    .map((one) => one.outerHTML.slice(0, 90))"""
"""What can be used and has no name for those who do not see it."""
WHERE = """() => {
    const at = document.activeElement;
    return at.id || at.dataset.act || at.dataset.sort || at.tagName;
}"""
HIDE = """() => {
    Object.defineProperty(document, "hidden", {get: () => true});
    document.dispatchEvent(new Event("visibilitychange"));
}"""


def test_themes_differ_and_the_choice_is_kept(served: Served, browser: Any) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    with Seen(browser, served.url, dark=True).live() as seen:
        dark = seen.page.evaluate(ground)
        seen.page.click("#theme")
        light = seen.page.evaluate(ground)
        assert light != dark
        assert seen.text("#theme") == "Theme: light"
        seen.page.reload()
        assert seen.page.evaluate(ground) == light
        seen.page.click("#theme")
        assert seen.page.evaluate(ground) == dark


def test_the_keyboard_reaches_everything_and_everything_has_a_name(served: Served, browser: Any) -> None:
    with Seen(browser, served.url).live() as seen:
        page = seen.page
        reached = set()
        page.evaluate("document.body.tabIndex = -1; document.body.focus()")
        for _ in range(40):
            page.keyboard.press("Tab")
            reached.add(page.evaluate(WHERE))
        assert {"lock", "theme", "search", "hottest"} <= reached
        assert sum(str(one).startswith(("Pin-", "Evict-")) for one in reached) == 8
        page.focus("[data-sort=hottest]")
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.dataset.sort") == "biggest"
        seen.until("#rows tr:first-child", "64")
        page.focus("#tokens-chart svg")
        page.keyboard.press("Home")
        assert "seconds ago" in (page.get_attribute("#tokens-chart svg", "aria-label") or "")
        assert page.evaluate(NAMELESS) == []
        assert page.get_attribute("html", "lang") == "en"
        assert page.locator("h1").count() == 1


def test_nothing_is_asked_of_anybody_else(served: Served, browser: Any) -> None:
    with Seen(browser, served.url).live() as seen:
        seen.page.wait_for_timeout(500)
        assert {url.split("/")[2] for url in seen.asked} == {f"127.0.0.1:{served.port}"}
        assert not any(TOKEN in url for url in seen.asked)
        assert seen.page.url == f"{served.url}/", "the token does not stay in the address"
        assert seen.page.evaluate("document.cookie") == ""
        blocked = seen.page.evaluate("""() => fetch("http://127.0.0.1:9/").then(() => "sent", () => "refused")""")
        assert blocked == "refused"
        assert any("Content Security Policy" in one for one in seen.complaints)


def test_a_hidden_page_asks_for_nothing(made: Any, served: Served, browser: Any) -> None:
    with Seen(browser, served.url).live() as seen:
        seen.page.evaluate(HIDE)
        behind: Any = served.app._app.state.service
        until = time.monotonic() + 10
        while behind._watchers:
            assert time.monotonic() < until
            time.sleep(0.02)
        before = len(seen.asked)
        seen.page.wait_for_timeout(1500)
        assert len(seen.asked) == before
