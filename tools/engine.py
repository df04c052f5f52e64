"""An engine behind an OpenAI-compatible address: asked to prefill, so that its connector stores what it computed.

Speaks what every such server does (`/v1/models`, `/v1/completions` with token ids) and vLLM's `/tokenize`. What an
engine answers is not believed: what it stored is looked for in the store. Must not know how a command shows either.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvstore.errors import AmbiguousError, EngineError, SettingsError
from kvstore.identity import salt_digest
from kvstore.match import Namespace
from kvstore.store import Store
from kvstore.tools.naming import space_of
from kvstore.tools.prompts import Prompt
from kvstore.tools.standing import ID_DIGITS, find_namespace

PIECE_TOKENS = 8192
ANSWER_LIMIT = 16 << 20
LOOK_S, QUIET_S = 0.05, 3.0
"""Between two looks; and how long the only namespace that has a prompt is watched for another one that gets it."""
NOTHING_STORED = (
    "is kvstore its KV connector (kv_connector KVStoreConnector), with this store's path, and does it not refuse the "
    "request? kvstore stats counts refusals"
)


class Engine:
    """The server at ``url``. model: as it names it, None for its first. key: for its Authorization header."""

    def __init__(self, url: str, model: str | None = None, key: str | None = None, timeout_s: float = 600.0) -> None:
        """Raises SettingsError for what is no address, EngineError where nobody answers."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise SettingsError(f"{url!r} is no address of a server", "write it as http://127.0.0.1:8000")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        self._key, self._timeout = key, timeout_s
        self.model = model if model is not None else self._first_model()

    def ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Ids of a prompt, by the engine's own tokenizer. Raises EngineError where it does not tell them."""
        if prompt.ids is not None:
            return prompt.ids
        asked: dict[str, Any] = {"model": self.model}
        if prompt.messages is not None:
            last = prompt.messages[-1].get("role")
            asked |= {"messages": list(prompt.messages), "add_generation_prompt": last != "assistant"}
            asked |= {"tools": list(prompt.tools)} if prompt.tools else {}
        else:
            asked["prompt"] = prompt.text
        try:
            return tuple(int(one) for one in self._post("/tokenize", asked)["tokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{self.url}/tokenize tells no tokens", "pass --tokenizer, or token ids") from error

    def prefill(self, ids: Sequence[int], salt: str) -> None:
        """Have a prompt run, and one token made. Raises EngineError."""
        asked = {"model": self.model, "prompt": list(ids), "max_tokens": 1, "temperature": 0}
        self._post("/v1/completions", asked | ({"cache_salt": salt} if salt else {}))

    def _first_model(self) -> str:
        try:
            return str(self._call("/v1/models", None)["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise EngineError(f"{self.url} serves no model", "pass --model, or another --engine") from error

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self._call(path, json.dumps(body).encode())

    def _call(self, path: str, body: bytes | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self.url + path, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                return json.loads(answer.read(ANSWER_LIMIT))
        except urllib.error.HTTPError as error:
            told = " ".join(error.read(2000).decode(errors="replace").split())[:300]
            raise EngineError(f"{self.url}{path} answers {error.code}: {told}", "see the engine's log") from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise EngineError(f"{self.url}{path}: {reason}", "check that the engine runs, and its address") from error


@dataclass(frozen=True, slots=True)
class Warmed:
    """A prompt and what is stored of it. there: tokens that were there before. space: where; None for nowhere."""

    there: int
    space: Namespace | None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """Where an engine's KV is looked for: under a salt, in one namespace where one is named. wait_s: for its saves."""

    salt: str = ""
    namespace: str | None = None
    wait_s: float = 60.0


def warm_by(
    engine: Engine, store: Store, ids: Sequence[int], wanted: Wanted, step: Callable[[int, int], None]
) -> Warmed:
    """Have an engine prefill what is missing, piece by piece, and wait until each piece is in the store.

    An engine runs at least a prompt's last token, so all but that is enough. Raises EngineError where nothing came.
    """
    start = time.perf_counter()
    before = _held(store, ids, wanted)
    enough = max(1, len(ids) - 1)
    there = max((tokens for tokens, _ in before.values()), default=0)
    complete = [space for tokens, space in before.values() if tokens >= enough]
    if len(complete) == len(before) == 1:
        return Warmed(there, complete[0])
    stops = [*range(PIECE_TOKENS, len(ids), PIECE_TOKENS), len(ids)]
    for stop in [one for one in stops if one > there or one == len(ids)]:
        step(stop, len(ids))
        engine.prefill(ids[:stop], wanted.salt)
        space = _wait(store, ids[:stop], wanted, before)
    return Warmed(_known(before, space.root), space, time.perf_counter() - start)


def stored_for(store: Store, ids: Sequence[int], wanted: Wanted) -> Warmed:
    """What would not have to be prefilled."""
    held = _held(store, ids, wanted).values()
    most = max((tokens for tokens, _ in held), default=0)
    return Warmed(most, next((space for tokens, space in held if tokens == most and most), None))


def _wait(store: Store, ids: Sequence[int], wanted: Wanted, before: dict[bytes, tuple[int, Namespace]]) -> Namespace:
    """Wait until a namespace has the tokens. The one that the engine fills is the one that got more of them."""
    began = time.monotonic()
    until = began + wanted.wait_s
    enough = max(1, len(ids) - 1)
    while True:
        now = _held(store, ids, wanted)
        grown = [space for root, (tokens, space) in now.items() if tokens >= enough and tokens > _known(before, root)]
        if grown:
            return grown[0]
        full = [space for tokens, space in now.values() if tokens >= enough]
        if len(full) == 1 and time.monotonic() > began + min(QUIET_S, wanted.wait_s):
            return full[0]
        if time.monotonic() > until:
            break
        time.sleep(LOOK_S)
    if full:
        roots = ", ".join(space.root.hex()[:ID_DIGITS] for space in full)
        raise AmbiguousError(f"{len(full)} namespaces have the prompt, and none got it now", f"--namespace: {roots}")
    most = max((tokens for tokens, _ in now.values()), default=0)
    raise EngineError(
        f"the engine ran {len(ids)} tokens, and the store has {most} of them after {wanted.wait_s:g} s", NOTHING_STORED
    )


def _known(before: dict[bytes, tuple[int, Namespace]], root: bytes) -> int:
    return before[root][0] if root in before else 0


def _held(store: Store, ids: Sequence[int], wanted: Wanted) -> dict[bytes, tuple[int, Namespace]]:
    """Stored tokens by namespace, of those under the salt."""
    uses = [find_namespace(store, wanted.namespace)] if wanted.namespace is not None else store.namespaces()
    spaces = [space_of(use) for use in uses if use.record.salt == salt_digest(wanted.salt)]
    return {space.root: (store.match(space, ids).tokens, space) for space in spaces}
