"""What the index costs, without payloads: matching, reserving and publishing, and finding victims, in a small store and
in a large one.

Two `ram` tiers whose segments have no bytes, only books, are filled with short conversations and one long one, and
then measured in turn. A figure is the large store's time over the small one's. Must not know the store's facade.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.errors import KVStoreError, NoSpaceError
from kvstore.events import Events, EvictReason
from kvstore.host import boottime_ns, free_bytes
from kvstore.identity import Chain, chain
from kvstore.index import Index
from kvstore.layout import Layout, Part
from kvstore.policy import lru
from kvstore.records import BlockName, NamespaceRecord, block_names
from kvstore.sizes import format_size
from kvstore.tiers import segments
from kvstore.tiers.null import NullMedium
from kvstore.tiers.ram import RamTier
from kvstore.tiers.reservation import Reserved
from kvstore.tiers.slotted import Space
from kvstore.tools.limits import timed
from kvstore.tools.ratios import Figure, Target, alternate, figure, paired
from kvstore.transaction import put_number

BLOCK_TOKENS = 16
MATCH_BLOCKS = 8192
BATCH = 64
SEGMENT_SLOTS = 256
"""As many as 1 MiB blocks in a segment of `nvme`."""
SLOT_BYTES = 8192
INDEX_BYTES = 2048
"""Index a slot: twice what blocks of 16 tokens may take before a tier stops growing."""
HARDLY = Target(1.5, at_most=True)
"""What "hardly differ" means here, for a hundred times the entries."""
TIMES = {"match": 4, "reserve_publish": 16, "victims": 4}
"""So many times the pairs asked for: these take milliseconds, and what else a core does doubles one now and then."""
PART = Part()
EPOCH = 0


class Books:
    """A `ram` tier of ``entries`` blocks without payloads, and the long conversation in it."""

    def __init__(self, folder: Path, entries: int) -> None:
        """folder: on tmpfs. Raises NoSpaceError when the index does not fit there."""
        slots = -(-(entries + SEGMENT_SLOTS) // SEGMENT_SLOTS) * SEGMENT_SLOTS
        index_bytes = -(-slots * INDEX_BYTES // 4096) * 4096 + (64 << 20)
        free = free_bytes(folder)
        if index_bytes > free * 3 // 4:
            problem = (
                f"an index of {entries} entries takes {format_size(index_bytes)}, {folder} has {format_size(free)}"
            )
            raise NoSpaceError(problem, "use fewer --entries, or a larger tmpfs")
        self.entries = entries
        self.index = Index(folder / "index", index_bytes, durable=False, name="ram")
        segment_bytes = SEGMENT_SLOTS * SLOT_BYTES
        budget = slots // SEGMENT_SLOTS * (segment_bytes + 4 * 4096)
        self.index.write(lambda txn: put_number(txn, segments.BUDGET, budget))
        self.tier = RamTier(
            "ram",
            folder,
            self.index,
            NullMedium(),
            owner=secrets.token_bytes(16),
            segment_bytes=segment_bytes,
            policy=lru,
            events=Events(),
        )
        layout = Layout.uniform(layers=1, heads=1, k_dim=8, block_tokens=BLOCK_TOKENS)
        self.root = layout.root()
        self.space: Space = self.tier.space(NamespaceRecord(self.root, b"", 0, 0, "bench", layout.to_json()))
        self._numbers = iter(range(1, 1 << 32))
        self.long = self.conversation(MATCH_BLOCKS)

    def conversation(self, blocks: int) -> Chain:
        """A chain that shares nothing with any other."""
        tokens = np.arange(blocks * BLOCK_TOKENS, dtype=np.uint32)
        tokens[0] = next(self._numbers)
        return chain(self.root, tokens, BLOCK_TOKENS)

    def put(self, names: Sequence[BlockName]) -> Reserved:
        """Reserve and publish blocks. Raises NoSpaceError when not all of them found a slot."""
        now = boottime_ns()
        reserved = self.tier.reserve(names, self.space, SLOT_BYTES, EPOCH, now=now)
        if len(reserved.placed) != len(names):
            raise NoSpaceError(f"{len(reserved.left)} of {len(names)} blocks found no slot", "use fewer --entries")
        self.tier.publish([(placement, bytes(16)) for placement in reserved.placed], now=now)
        return reserved

    def fill(self, step: Callable[[int], None]) -> None:
        """The long conversation among short ones, ``entries`` blocks in all."""
        names, done = block_names(self.long, PART), 0
        pieces = [names[start : start + BATCH] for start in range(0, len(names), BATCH)]
        every = max(1, self.entries // MATCH_BLOCKS)
        for index in range(self.entries // BATCH):
            own = index % every == 0 and pieces
            self.put(pieces.pop(0) if own else block_names(self.conversation(BATCH), PART))
            done += BATCH
            step(done)
        for piece in pieces:
            self.put(piece)

    def match(self) -> float:
        """Seconds to find all blocks of the long conversation, and the best partial block after them."""
        names = block_names(self.long, PART)
        found: list[Any] = []

        def work() -> None:
            found.extend(self.tier.find(names))
            self.tier.nearest(self.long, PART, len(self.long) - 1, BLOCK_TOKENS)

        seconds = timed(work)
        if any(entry is None for entry in found):
            raise KVStoreError("the long conversation is not whole", "this is a defect of the benchmark: report it")
        return seconds

    def write(self) -> float:
        """Seconds to reserve and publish one batch where there is room; it is removed afterwards."""
        names = block_names(self.conversation(BATCH), PART)
        seconds = timed(lambda: self.put(names))
        self.tier.remove([(name.index_key, name.key) for name in names], EvictReason.EVICT)
        return seconds

    def evict(self, victims: int) -> float:
        """Seconds to reserve and publish ``victims`` blocks in a full tier, each in the place of another."""
        batches = [block_names(self.conversation(BATCH), PART) for _ in range(-(-victims // BATCH))]
        gone = 0

        def work() -> None:
            nonlocal gone
            for names in batches:
                gone += len(self.put(names).evicted)

        seconds = timed(work)
        if gone < victims // 2:
            raise KVStoreError("the tier was not full", "this is a defect of the benchmark: report it")
        return seconds / len(batches)

    def fill_up(self) -> None:
        """Take the last free slots, so that every further block needs a victim."""
        while not self.put(block_names(self.conversation(BATCH), PART)).evicted:
            pass


def measure(
    sizes: tuple[int, int], pairs: int, folder: Path, step: Callable[[str, int, int | None], None]
) -> dict[str, Any]:
    """All figures. sizes: entries of the small and of the large store. folder: on tmpfs; nothing stays there."""
    small_entries, large_entries = (max(size, MATCH_BLOCKS + BATCH) // BATCH * BATCH for size in sizes)
    with ExitStack() as stack:
        made: list[Books] = []
        for entries in (small_entries, large_entries):
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=folder)))
            books = Books(place, entries)
            stack.callback(books.tier.close)
            books.fill(lambda done, entries=entries: step(f"fill {entries:,}", done, entries))  # type: ignore[misc]
            made.append(books)
        small, large = made
        # Enough victims that the large store picks its coldest 1/64 at least once within each sample.
        victims = max(2 * BATCH, large_entries // 64)
        runs: dict[str, tuple[Callable[[], float], Callable[[], float], int]] = {
            "match": (large.match, small.match, MATCH_BLOCKS),
            "reserve_publish": (large.write, small.write, BATCH),
            "victims": (lambda: large.evict(victims), lambda: small.evict(victims), BATCH),
        }
        figures: dict[str, Any] = {}
        for name, (of_large, of_small, blocks) in runs.items():
            if name == "victims":
                large.fill_up()
                small.fill_up()
            figures[name] = _compared(name, of_large, of_small, blocks, TIMES[name] * pairs, step)
        used = {str(books.entries): books.index.used_bytes() for books in made}
    head = {
        "small_entries": small_entries,
        "large_entries": large_entries,
        "match_blocks": MATCH_BLOCKS,
        "batch": BATCH,
    }
    return {**head, "index_bytes": used, **figures}


def _compared(
    name: str,
    of_large: Callable[[], float],
    of_small: Callable[[], float],
    blocks: int,
    pairs: int,
    step: Callable[[str, int, int | None], None],
) -> dict[str, Any]:
    """One figure: what ``blocks`` blocks take in the large store over what they take in the small one."""
    big, little = alternate(of_large, of_small, pairs, lambda done: step(name, done, pairs))
    both = paired(big, little, HARDLY, rate=False)
    return {
        "small_us_a_block": _a_block(little, blocks).median,
        "large_us_a_block": _a_block(big, blocks).median,
        "large_over_small": both.ratio.median,
        "verdict": str(both.ratio.verdict),
        "samples": both.to_dict(),
    }


def _a_block(seconds: Sequence[float], blocks: int) -> Figure:
    return figure([value / blocks * 1e6 for value in seconds])
