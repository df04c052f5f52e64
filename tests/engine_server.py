"""A real HTTP server that stands in for an engine in one thing: it prefills what it is sent, and stores it.

Run as ``python -m engine_server MODEL STORE``; writes its address, then serves `/v1/models`, `/v1/completions` (token
ids, ``cache_salt``) and `/tokenize` until its input ends. With ``forgetful`` it answers and stores nothing; ``keyed``
asks for the key "secret".
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

import kvstore
from kvstore.adapters.transformers import attach
from kvstore.tools import model as models


class Server:
    """The model, the store, and one lock: it is a single engine."""

    def __init__(self, folder: str, path: str, manner: str) -> None:
        self.model, self.tokenizer = models.load(folder)
        self.store, self.manner, self.lock = kvstore.open(path, ram="64MiB", nvme="128MiB"), manner, threading.Lock()
        self.ran: list[int] = []

    def models(self) -> dict[str, Any]:
        return {"data": [{"id": "tiny", "object": "model"}], "ran": self.ran}

    def tokenize(self, asked: dict[str, Any]) -> dict[str, Any]:
        if "messages" in asked:
            text = "".join(f"{one['role']}: {one['content']}\n" for one in asked["messages"])
        else:
            text = asked["prompt"]
        return {"tokens": self.tokenizer(text)["input_ids"]}

    def completions(self, asked: dict[str, Any]) -> dict[str, Any]:
        row = torch.tensor([asked["prompt"]])
        with self.lock:
            self.ran.append(row.shape[1])
            if self.manner == "forgetful":
                attached: Any = contextlib.nullcontext()
            else:
                attached = attach(self.model, self.store, salt=asked.get("cache_salt", ""), label="tiny", warm_tokens=0)
            with attached:
                made = self.model.generate(
                    row, attention_mask=torch.ones_like(row), max_new_tokens=asked["max_tokens"], pad_token_id=0
                )
        return {"choices": [{"text": self.tokenizer.decode(made[0, row.shape[1] :])}]}


def handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, server.models()) if self.path == "/v1/models" else self.answer(404, {"error": self.path})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if server.manner == "keyed" and self.headers["Authorization"] != "Bearer secret":
                self.answer(401, {"error": "no key"})
            elif self.path == "/tokenize":
                self.answer(200, server.tokenize(asked))
            elif self.path == "/v1/completions":
                self.answer(200, server.completions(asked))
            else:
                self.answer(404, {"error": self.path})

        def answer(self, code: int, told: dict[str, Any]) -> None:
            raw = json.dumps(told).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: Any) -> None:
            return

    return Handler


def main(folder: str, path: str, manner: str = "") -> None:
    torch.set_num_threads(1)
    server = Server(folder, path, manner)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler(server)) as http, server.store:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        print(f"http://127.0.0.1:{http.server_address[1]}", flush=True)
        sys.stdin.read()
        http.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
