"""The description of the API is true: thousands of generated calls, with and without the token, find no failure of the
server and no answer that is not described; and its examples work.

What fits the description is accepted, but for calls where it cannot say all: exactly one of several ways to name a
prefix, sizes as people write them, a configuration that makes a model. There problems say what is wrong.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.kv import HostKV

pytest.importorskip("fastapi")
pytest.importorskip("schemathesis")
from served import TOKEN, serving

from kvstore.tools import api_looking


def written(file: Path) -> Path:
    """What is left out of the checks, and where."""
    file.write_text(
        "[[operations]]\n"
        'include-path-regex = "^/v1/(show|explain|pin|prefetch|evict|quota|plan)$"\n'
        "[operations.checks.positive_data_acceptance]\n"
        "enabled = false\n"
    )
    return file


@pytest.mark.parametrize(("token", "examples", "calls"), [(TOKEN, 40, 1000), (None, 15, 500)], ids=["with", "without"])
def test_generated_calls_find_nothing_wrong(
    made: Any, tmp_path: Path, token: str | None, examples: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_looking, "STREAM_S", 0.05)
    with serving(made.path) as served:
        line = [sys.executable, "-m", "schemathesis.cli", "run", f"{served.url}/openapi.json"]
        line[3:3] = ["--config-file", str(written(tmp_path / "schemathesis.toml"))]
        line += ["--phases", "examples,coverage,fuzzing"]
        line += ["--max-examples", str(examples), "--suppress-health-check", "all"]
        line += ["--seed", "1", "--no-color", "--generation-database", "none"]
        if token is not None:
            line += ["--header", f"Authorization: Bearer {token}"]
        done = subprocess.run(
            line, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "CI": ""}, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        passed = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
        assert passed is not None, done.stdout
        assert int(passed[2]) > calls
        assert served.ask("GET", "/healthz").status == 200
        assert served.store.verify().problems == []
        kv = HostKV.stacked(made.layout, np.zeros((2, 2, 2, 9, 16), np.uint32))
        space = served.store.namespace(made.layout, salt="first", label="first")
        served.store.save(space, range(9), kv)
        assert served.store.match(space, range(9)).tokens == 9, "the store is as usable as before"


def test_every_example_of_the_description_works(made: Any) -> None:
    with serving(made.path) as served:
        described = served.get("/openapi.json")
        schemas = described["components"]["schemas"]
        tried = []
        for path, operations in described["paths"].items():
            body = operations.get("post", {}).get("requestBody", {})
            schema = body.get("content", {}).get("application/json", {}).get("schema", {})
            name = schema.get("$ref", "").rpartition("/")[2]
            for example in schemas.get(name, {}).get("examples", []):
                if path == "/v1/unpin":
                    served.post("/v1/pin", {"tokens": [40, 100, 101], "pin_as": example["name"]})
                found = served.ask("POST", path, example)
                assert found.status in (200, 202), (path, found.body)
                tried.append(path)
                if found.status == 202:
                    served.finished(found.told)
        assert sorted(tried) == sorted(path for path, of in described["paths"].items() if "post" in of)


def test_every_call_says_what_it_does_and_how_it_is_guarded(made: Any) -> None:
    with serving(made.path) as served:
        described = served.get("/openapi.json")
    for path, operations in described["paths"].items():
        for method, one in operations.items():
            assert one["description"], path
            assert "default" in one["responses"], path
            changes = (method != "get" and path != "/v1/plan") or path.startswith("/v1/jobs")
            assert bool(one.get("security")) == changes, path
    assert described["components"]["schemas"]["Problem"]["properties"]["remedy"]
