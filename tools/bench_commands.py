"""How long commands take on a store with very many blocks, and when they say their first word, each in its own process;
and how soon stats are there, asked of the store and of a server.

The store has `nvme` alone filled: a whole index, and segments that are holes. Its blocks can be found, listed and
evicted, never loaded. Must not know how a command works.
"""

from __future__ import annotations

import os
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import kvstore
from kvstore import superblock
from kvstore.errors import KVStoreError, NoSpaceError
from kvstore.events import Events
from kvstore.host import boottime_ns
from kvstore.identity import Tokens, chain
from kvstore.layout import Layout, Part
from kvstore.match import Namespace
from kvstore.records import block_names
from kvstore.sizes import MIB
from kvstore.store import Store
from kvstore.tiers import opening
from kvstore.tiers.medium import Medium, segment_path
from kvstore.tiers.slotted import SlottedTier
from kvstore.tools.limits import timed
from kvstore.tools.ratios import Target, figure
from kvstore.tools.remote import Remote
from kvstore.tools.scratch import scratch_store
from kvstore.tools.served import served
from kvstore.tools.standing import standing_store

BLOCK_TOKENS, BLOCKS = 16, 64
"""Of a conversation."""
BATCH = 16
"""Conversations in one transaction."""
SLOT_BYTES = 8192
SEGMENT_BYTES = 64 * MIB
INDEX_BYTES, INDEX_MIN = 2048, 64 * MIB
"""Index a block, twice what blocks of 16 tokens may take before a tier stops growing; and for a small store."""
RAM_BYTES = 64 * MIB
SOON_S = 1.0
"""Within so long a command should answer, or say what it is at."""
STATS = Target(0.02, at_most=True)
"""Median seconds in which stats should be there."""
ASKED, BETWEEN_S = 100, 0.05
"""So many times, so far apart: a server's own looks at the store fall between."""
EACH = "{each}"
"""Stands for the number of a run: what one has made is taken away by another command's run of that number."""
LABEL, SALT, NAME = "bench", "theirs", "rules"

Step = Callable[[str, int, int | None], None]


class Holes:
    """A medium whose segments have their length and no blocks of the disk; all else is the medium's own."""

    def __init__(self, medium: Medium, directory: Path) -> None:
        self._medium, self._directory = medium, directory
        self.name = medium.name

    def allocate(self, segment: int, size: int) -> None:
        """A file of this length that takes no room."""
        with segment_path(self._directory, segment).open("wb") as file:
            file.truncate(size)

    def prepare(self, segment: int, size: int) -> None:
        """Zeros are what holes read as."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._medium, name)


@dataclass(frozen=True, slots=True)
class Timed:
    """One run of a command. said_s: until its first word, on whatever output; code: its exit code."""

    seconds: float
    said_s: float
    code: int
    error: str


def measure(entries: int, repeats: int, folder: Path, step: Step) -> dict[str, Any]:
    """Seconds of every command on a store of ``entries`` blocks in ``folder``, which is on a disk; nothing stays there.

    Raises NoSpaceError when the index does not fit there, MissingExtraError without what serves.
    """
    with scratch_store(folder) as path:
        held = _fill(path, entries, step)
        stats = _stats(path, step)
        lines = _lines(path.parent)
        found: dict[str, Any] = {}
        for done, (name, words) in enumerate(lines.items()):
            step(f"run: {name}", done, len(lines))
            runs = [_run(path, [word.replace(EACH, str(number)) for word in words]) for number in range(repeats)]
            if failed := [run for run in runs if run.code not in _codes(name)]:
                problem = f"kvstore {' '.join(words)} ended with {failed[0].code}: {failed[0].error.strip()}"
                raise KVStoreError(problem, "this is a defect of the benchmark: report it")
            seconds = statistics.median(run.seconds for run in runs)
            said = statistics.median(run.said_s for run in runs)
            found[name] = {"seconds": seconds, "said_s": said, "soon": said <= SOON_S}
    late = [name for name, one in found.items() if not one["soon"]]
    return {"entries": held, "soon_s": SOON_S, "late": late, "stats": stats, "commands": found}


def _stats(path: Path, step: Step) -> dict[str, Any]:
    """Seconds of `Store.stats` in this process, and of a request for stats to ``kvstore serve``."""
    with served(path) as url, standing_store(path) as store:
        server = Remote(url)
        asked: dict[str, Callable[[], object]] = {
            "call_s": store.stats,
            "request_s": lambda: server.get("/v1/stats"),
        }
        return {name: figure(_asked(name, ask, step), STATS).to_dict() for name, ask in asked.items()}


def _asked(name: str, ask: Callable[[], object], step: Step) -> list[float]:
    seconds: list[float] = []
    for done in range(ASKED):
        step(f"stats: {name}", done, ASKED)
        seconds.append(timed(ask))
        time.sleep(BETWEEN_S)
    return seconds


def _lines(folder: Path) -> dict[str, Sequence[str]]:
    """Command lines by what they are called here. folder: for files that commands read."""
    known, other = _conversation(1).tolist(), _conversation(1).tolist()
    other[200] = 7
    ids, new = (",".join(map(str, some)) for some in (known, other))
    prompt, file = folder / "prompt.txt", str(folder / "x.safetensors")
    prompt.write_text(new)
    return {
        "--version": ["--version"],
        "stats": ["stats"],
        "ls": ["ls"],
        "ls NAMESPACE": ["ls", LABEL],
        "names": ["names"],
        "show NAME": ["show", NAME],
        "show IDS": ["show", ids],
        "explain IDS": ["explain", new],
        "explain FILE": ["explain", str(prompt)],
        "pin": ["pin", ids, "--name", f"second-{EACH}"],
        "unpin": ["unpin", f"second-{EACH}"],
        "top": ["top", "--count", "1", "--every", "0.1"],
        "savings": ["savings"],
        "quota": ["quota"],
        "namespace": ["namespace", LABEL, "--ttl", "86400"],
        "doctor": ["doctor"],
        "verify": ["verify", "--books-only"],
        "verify, payloads": ["verify"],
        "export PROMPT": ["export", file, "--prompt", NAME, "--dry-run"],
        "export NAMESPACE": ["export", file, "--namespace", LABEL, "--dry-run"],
        **{
            f"evict {' '.join(words)}": ["evict", *words, "--dry-run"]
            for words in (
                ["--all"],
                ["--tier", "ram"],
                ["--namespace", LABEL],
                ["--namespace", LABEL, "--prefix", "1,1,2"],
                ["--name", NAME],
                ["--salt", SALT],
                ["--unused", "3600"],
                ["--unused", "0"],
            )
        },
    }


def _codes(name: str) -> Iterable[int]:
    """Exit codes that a command may have here: blocks without bytes are damaged, and a host may refuse something."""
    return {"verify, payloads": (1,), "doctor": (0, 1)}.get(name, (0,))


def _run(path: Path, words: Sequence[str]) -> Timed:
    command = [sys.executable, "-m", "kvstore.tools.cli", *words]
    environment = {name: value for name, value in os.environ.items() if name not in ("KVSTORE_URL", "KVSTORE_CONFIG")}
    environment["KVSTORE_PATH"] = os.fspath(path)
    with tempfile.TemporaryFile() as told:
        began = time.perf_counter()
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
        said = _listen(child, told, began)
        code = child.wait()
        seconds = time.perf_counter() - began
        told.seek(0)
        return Timed(seconds, min(said, seconds), code, told.read().decode(errors="replace")[-400:])


def _listen(child: subprocess.Popen[bytes], told: Any, began: float) -> float:
    """Read both outputs to their end; seconds until the first byte of either. told: gets what was an error."""
    said = float("inf")
    with selectors.DefaultSelector() as outputs:
        for output in (child.stdout, child.stderr):
            assert output is not None
            outputs.register(output, selectors.EVENT_READ)
        while outputs.get_map():
            for key, _ in outputs.select():
                data = os.read(key.fd, 65536)
                if not data:
                    outputs.unregister(key.fileobj)
                    continue
                said = min(said, time.perf_counter() - began)
                if key.fileobj is child.stderr:
                    told.write(data)
    for output in (child.stdout, child.stderr):
        assert output is not None
        output.close()
    return said


# ------------------------------------------------------------------- the store


def _conversation(number: int) -> Tokens:
    """Token ids that share nothing with any other conversation."""
    tokens = np.arange(BLOCKS * BLOCK_TOKENS, dtype=np.uint32)
    tokens[0] = number
    return tokens


def _fill(path: Path, entries: int, step: Step) -> int:
    """A store with so many blocks on `nvme`, a tenth of them under a salt, and a name; how many it has."""
    count = -(-entries // (BLOCKS * BATCH)) * BATCH
    held = count * BLOCKS
    segments = -(-held * SLOT_BYTES // SEGMENT_BYTES) + 2
    index_bytes = -(-held * INDEX_BYTES // 4096) * 4096 + INDEX_MIN
    budget = index_bytes + segments * (SEGMENT_BYTES + MIB)
    superblock.prepare_directory(path)
    with superblock.opening(path):
        opening.refuse_larger_than_medium("nvme", budget, path)
        made, _ = opening.open_index(
            "nvme",
            path / "nvme",
            store=superblock.store_id(path),
            budget=budget,
            segment_bytes=SEGMENT_BYTES,
            index_bytes=index_bytes,
            durable=True,
            alone=True,
            events=Events(),
        )
        made.close()
    sizes: dict[str, Any] = {"ram": RAM_BYTES, "nvme": budget, "nvme_segment_bytes": SEGMENT_BYTES}

    def wrap(medium: Medium) -> Medium:
        return Holes(medium, path / "nvme") if medium.name == "nvme" else medium

    with kvstore.open(path, wrap=wrap, **sizes) as store:
        layout = Layout.uniform(layers=1, heads=1, k_dim=8, block_tokens=BLOCK_TOKENS)
        plain, salted = store.namespace(layout, label=LABEL), store.namespace(layout, salt=SALT, label="salted")
        for first in range(0, count, BATCH):
            step(f"fill {held:,}", first * BLOCKS, held)
            _put(store, salted if first // BATCH % 10 == 1 else plain, range(first, first + BATCH))
        store.pin(NAME, plain, _conversation(1))
    return held


def _put(store: Store, space: Namespace, numbers: Iterable[int]) -> None:
    """Reserve and publish the blocks of some conversations; not a byte of them is written."""
    tier: SlottedTier | None = store._core.nvme
    assert tier is not None
    linked = (chain(space.root, _conversation(number), BLOCK_TOKENS) for number in numbers)
    names = [name for one in linked for name in block_names(one, Part())]
    now = boottime_ns()
    reserved = tier.reserve(names, tier.space(space.record), SLOT_BYTES, 0, now=now)
    if len(reserved.placed) != len(names) or reserved.evicted:
        problem = f"{len(reserved.left)} of {len(names)} blocks found no slot, and {len(reserved.evicted)} were evicted"
        raise NoSpaceError(problem, "use fewer --entries")
    tier.publish([(placement, bytes(16)) for placement in reserved.placed], now=now)
