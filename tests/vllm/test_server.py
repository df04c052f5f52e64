"""The OpenAI server, with a real model: a chat goes on after a restart, salts are those of requests, and it warms."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from engines import ENVIRONMENT, ROOT, Place

from kvstore.errors import NotFoundError
from kvstore.tools.model import obtain

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.timeout(1200),
]
ROOM = {"ram": "512MiB", "nvme": "1GiB", "ram_segment_bytes": "64MiB", "nvme_segment_bytes": "64MiB"}
STORY = "Once upon a time there was a miller who had three sons, a mill, a donkey and a cat. " * 88
RULES = ("Answer in short sentences, never guess, and say where you know it from. " * 40).strip()
"""Warmed by the command line; what the server is asked next begins with it."""
QUESTION = {"role": "user", "content": f"{STORY}\nWho had three sons?"}


@pytest.fixture(scope="module")
def model() -> Path:
    """A real one: the demo's."""
    try:
        return obtain()
    except NotFoundError as error:
        pytest.skip(f"no real model: {error.problem}")


class Server:
    """The server, on a port of its own."""

    def __init__(self, place: Place, model: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        transfer = {
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "kvstore.adapters.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {**place.settings, **ROOM},
        }
        flags = ["--enforce-eager", "--dtype", "float32", "--max-model-len", "2304", "--enable-prompt-tokens-details"]
        self._log = (place.path.parent / f"server-{self.port}.log").open("w+")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
                *("--served-model-name", "m", "--host", "127.0.0.1", "--port", str(self.port), *flags),
                *("--shutdown-timeout", "30", "--kv-transfer-config", json.dumps(transfer)),
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)},
            cwd=place.path.parent,
            start_new_session=True,
        )
        until = time.monotonic() + 500
        while not self._is_up():
            assert self.process.poll() is None, self.log()[-4000:]
            assert time.monotonic() < until, self.log()[-4000:]
            time.sleep(0.5)

    def log(self) -> str:
        """What it printed."""
        self._log.seek(0)
        return self._log.read()

    def chat(self, *messages: dict[str, str], **more: Any) -> dict[str, Any]:
        """A greedy answer."""
        return self._ask("chat/completions", {"messages": messages, "max_tokens": 16, **more})

    def _ask(self, call: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/{call}",
            json.dumps({"model": "m", "temperature": 0, **body}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            told: dict[str, Any] = json.load(answer)
        return told

    def complete(self, prompt: str, **more: Any) -> dict[str, Any]:
        """One token after a text."""
        return self._ask("completions", {"prompt": prompt, "max_tokens": 1, **more})

    def metrics(self) -> str:
        """The page for Prometheus."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            return str(answer.read().decode())

    def _is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._log.close()


def cached(answer: dict[str, Any]) -> int:
    """Prompt tokens that were not computed."""
    return int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def best(answer: dict[str, Any]) -> dict[str, float]:
    """Log-probabilities of the five best first tokens."""
    first = answer["choices"][0]["logprobs"]["content"][0]
    return {entry["token"]: entry["logprob"] for entry in first["top_logprobs"]}


def warm(place: Place, server: Server, *words: str | Path) -> Any:
    """`kvstore warm --engine`, in a process of its own beside the server."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "kvstore.tools.cli", "warm", *map(str, words), "--json"),
            *("--engine", f"http://127.0.0.1:{server.port}", "--path", str(place.path)),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "KVSTORE_RAM_DIRECTORY": str(place.settings["ram_directory"])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_chat_and_what_was_warmed_are_there_after_the_server_was_restarted(place: Place, model: Path) -> None:
    probable = {"logprobs": True, "top_logprobs": 5}
    with Server(place, model) as server:
        first = server.chat(QUESTION, **probable)
        assert cached(first) == 0
        salted = server.chat(QUESTION, cache_salt="tenant")
        assert cached(salted) == 0
        warmed = warm(place, server, RULES, "--text", "--salt", "house", "--name", "rules")
        assert (warmed["model"], warmed["already_there"], warmed["prefilled"]) == ("m", 0, warmed["tokens"])
        assert warmed["tokens"] > 500
        assert warm(place, server, RULES, "--text", "--salt", "house")["prefilled"] <= 1
    said, asked = first["choices"][0]["message"], first["usage"]["prompt_tokens"]
    assert asked > 2000
    with Server(place, model) as server:
        again = server.chat(QUESTION, **probable)
        assert again["choices"][0]["message"]["content"] == said["content"]
        assert cached(again) == asked - 1
        assert best(again) == pytest.approx(best(first), abs=1e-3)
        following = server.chat(
            QUESTION, {"role": "assistant", "content": said["content"]}, {"role": "user", "content": "And?"}
        )
        assert cached(following) >= asked - 1
        assert cached(server.chat(QUESTION, cache_salt="tenant")) == asked - 1
        assert cached(server.chat(QUESTION, cache_salt="another")) == 0
        known = place.path.parent / "chat.jsonl"
        known.write_text(json.dumps(QUESTION) + "\n")
        assert warm(place, server, known)["already_there"] > 2000
        assert warm(place, server, RULES, "--text", "--salt", "house")["prefilled"] <= 1
        followed = server.complete(f"{RULES} Go on.", cache_salt="house")
        assert cached(followed) >= warmed["tokens"] - 1
        page = server.metrics()
    assert "vllm:kvstore_hit_tokens_total{" in page
    assert "vllm:kvstore_prefill_tokens_total{" in page
    assert "vllm:external_prefix_cache_hits_total" in page
