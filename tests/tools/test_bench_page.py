"""What the benchmark of a page asks is what the page asks, as often; and it leaves nothing running."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import MissingExtraError

pytest.importorskip("fastapi")
pytest.importorskip("torch")
from served import serving

from kvstore.tools import bench_page
from kvstore.tools.bench_page_worker import HISTORY, SLOW, SLOW_S, STREAM

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "tools" / "page"


def test_it_asks_what_the_page_asks_as_often() -> None:
    scripts = "".join(file.read_text() for file in sorted(PAGE.glob("*.js")))
    looked = set(re.findall(r"""["`](/v1/[a-z]+)""", scripts))
    changed = set(re.findall(r"""ask\("POST", "(/v1/[a-z]+)""", scripts))
    mine = {path.partition("?")[0] for path in (*SLOW, HISTORY, STREAM, "/v1/server")}
    assert mine == looked - changed
    assert re.findall(r"SLOW_MS = ([\d_]+)", scripts) == [f"{SLOW_S:.0f}_000"]
    assert re.findall(r"KEPT = (\d+)", scripts) == [HISTORY.rpartition("=")[2]]
    assert re.findall(r"LIMIT = (\d+)", scripts) == [SLOW[0].rpartition("=")[2]]


def test_a_page_without_a_browser_loads_all_and_follows(made: Any) -> None:
    with serving(made.path) as served:
        line = [sys.executable, "-m", "kvstore.tools.bench_page_worker", served.url]
        with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as page:
            assert page.stdout is not None
            assert page.stdout.readline() == "open\n"
            said, _ = page.communicate("")
        found = re.fullmatch(r'{"calls": (\d+), "looks": (\d+)}\n', said)
        assert found is not None, said
        assert int(found[1]) >= len(list(PAGE.glob("*.js"))) + len(SLOW) + 4
        assert int(found[2]) >= 1


@pytest.mark.skipif(not any(map(shutil.which, bench_page.BROWSERS)), reason="no browser: apt-get install chromium")
def test_a_real_browser_opens_the_page(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with bench_page._watched(made.path, bench_page._browser()) as counts:
        pass
    assert counts["streams"] == 1


def test_without_a_browser_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MissingExtraError, match="Chromium"):
        bench_page._browser()
