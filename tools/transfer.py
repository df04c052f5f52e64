"""Stored prefixes out of a store into a `Bundle`, and out of one into a store, block by block.

Exporting reads slots as they lie and verifies each; it neither promotes nor touches. Importing is a save whose source
is the file, so that keys are made anew under the importing namespace's root. Must not know how a command shows either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.errors import KVStoreError, LayoutError, NoSpaceError, NotFoundError
from kvstore.events import EvictReason
from kvstore.header import HEADER_BYTES, inspect_slot, slot_bytes
from kvstore.kv import Bytes, Gathering, KVBuffer, Run, Told
from kvstore.layout import LayerShape, Layout, Part
from kvstore.match import Match, Namespace, Piece
from kvstore.records import BlockName, Entry
from kvstore.sizes import format_size
from kvstore.states import State
from kvstore.store import Store
from kvstore.tiers.medium import aligned_buffer
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.ram import RamTier
from kvstore.tiers.slotted import SlottedTier
from kvstore.tools.bundle import Bundle, BundleWriter, pack
from kvstore.tools.stored import layout_difference

ATTEMPTS = 3
"""Reads of a block that moves from tier to tier meanwhile, and saves that were skipped."""
STEP_BYTES = 32 << 20
"""What is saved before the mover is waited for."""
FLUSH_S = 300.0


@dataclass(frozen=True, slots=True)
class Moved:
    """What went over: sequences, tokens and blocks, payload bytes as they were, and blocks that were there already."""

    sequences: int
    tokens: int
    blocks: int
    payload_bytes: int
    known: int = 0


def export(
    store: Store, matches: Sequence[Match], writer: BundleWriter, level: int, step: Callable[[int, int], None]
) -> Moved:
    """Write the matched tokens of several sequences of one namespace; what they share is written once.

    Raises NotFoundError for a block that went away meanwhile.
    """
    numbers: dict[tuple[bytes, int], int] = {}
    tokens = size = done = 0
    total = sum(len(_first(match)) for match in matches)
    for match in matches:
        parent = -1
        for at, piece in enumerate(_first(match)):
            mark = piece.name.key, piece.take
            if mark not in numbers:
                payloads = {}
                for part, pieces in match.pieces.items():
                    raw = _payload(store, match.space, pieces[at])
                    payloads[part] = pack(raw, match.space.layout.itemsize, level)
                    size += len(raw)
                ids = match.chain.tokens[piece.start : piece.start + piece.take]
                numbers[mark] = writer.add(parent, ids, payloads)
                tokens += piece.take
            parent = numbers[mark]
            done += 1
            step(done, total)
    return Moved(len(matches), tokens, len(numbers), size)


def restore(store: Store, bundle: Bundle, space: Namespace, step: Callable[[int, int], None]) -> Moved:
    """Save every sequence of an export under a namespace of its layout. It must have been verified.

    Raises NoSpaceError where its lowest tier did not take all of it; what it took stays, and is right.
    """
    layout = bundle.layout
    total = sum(1 for _ in bundle.sequences())
    size_a_block = max(1, sum(layout.payload_bytes(part.group) for part in bundle.parts))
    stride = max(1, min(STEP_BYTES, store.settings.ram // 8) // size_a_block) * layout.block_tokens
    new = known = size = tokens = 0
    for count, (blocks, ids) in enumerate(bundle.sequences(), 1):
        buffers: dict[Part, KVBuffer] = {part: BundleKV(bundle, blocks, part) for part in bundle.parts}
        for stop in [*range(stride, len(ids), stride), len(ids)]:
            # On a busy machine a save may not have had the index in time; and what an import that was interrupted
            # has left in memory alone is known to a save, which does not take it to the disk.
            for _ in range(ATTEMPTS):
                saved = store.save(space, ids[:stop], buffers)
                new, size = new + saved.new_blocks, size + saved.bytes
                known = saved.known_blocks if stop == len(ids) else known
                store.flush(FLUSH_S)
                match = store.match(space, ids[:stop])
                kept = _kept(store, match)
                if kept == stop:
                    break
                _leave_to_disk(store, match)
        if kept < len(ids):
            lowest = store._core.lowest.name
            needed = -(-len(ids) // layout.block_tokens)
            need = format_size(needed * sum(slot_bytes(layout.payload_bytes(part.group)) for part in bundle.parts))
            raise NoSpaceError(
                f"only {kept} of the {len(ids)} tokens of a sequence found room on {lowest}",
                f"make room there, or raise its budget: this sequence alone takes {need} beside the index. Then import "
                "again: what is there already is kept",
            )
        tokens += len(ids)
        step(count, total)
    return Moved(total, tokens, new, size, known)


class BundleKV:
    """A KVBuffer over one sequence of an export, to be saved from."""

    def __init__(self, bundle: Bundle, blocks: Sequence[int], part: Part) -> None:
        self._bundle, self._blocks, self._part = bundle, blocks, part

    @property
    def capacity(self) -> int:
        """Tokens of the sequence."""
        return sum(self._bundle.counts[block] for block in self._blocks)

    @property
    def device(self) -> str | None:
        """Host memory: None."""
        return None

    def fits(self, layout: Layout, group: int) -> bool:
        """Whether the export's payloads are those of a layout's group."""
        return self._bundle.layout.alike(self._part.group, layout, group)

    def gather(self, start: int, run: Run) -> None:
        """Copy payloads out of the file, verified. A last block that is saved shorter than it is stored is cut."""
        gather = self.gathering(start, run)
        for at in range(run.count):
            gather(at, lambda payload: None)

    def gathering(self, start: int, run: Run) -> Gathering:
        """A gather, to be done payload by payload (`KVBuffer.gathering`)."""
        layout, part = self._bundle.layout, self._part
        first = start // layout.block_tokens
        size = layout.payload_bytes(part.group, run.tokens)

        def gather(at: int, told: Told) -> None:
            block = self._blocks[first + at]
            stored = self._bundle.payload(block, part)
            payload = run.payload(at, size)
            payload[:] = cut(stored, layout.groups[part.group], layout.itemsize, self._bundle.counts[block], run.tokens)
            told(payload.data)

        return gather

    def scatter(self, start: int, run: Run) -> None:
        """Never called: an export is not written to. Raises LayoutError."""
        raise LayoutError("an export cannot be loaded into", "import it into a store")


def refuse_other_layout(mine: Layout, other: Layout, what: str) -> None:
    """Raises LayoutError, with every difference named, where two layouts are not the same."""
    differs = layout_difference(mine, other)
    if differs:
        told = "; ".join(f"{name} is {theirs} in the export, {ours} in {what}" for name, theirs, ours in differs)
        raise LayoutError(
            f"the export's KV means something else: {told}", "export from the same model, in the same dtype"
        )


def cut(payload: Bytes, shapes: Sequence[LayerShape], itemsize: int, tokens: int, take: int) -> Bytes:
    """The payload of the first ``take`` tokens, out of one of ``tokens``."""
    if take == tokens:
        return payload
    pieces: list[Bytes] = []
    for heads, dim in [(one.heads, dim) for one in shapes for dim in (one.k_dim, one.v_dim)]:
        size = heads * tokens * dim * itemsize
        plane, payload = payload[:size].reshape(heads, tokens, dim * itemsize), payload[size:]
        pieces.append(plane[:, :take].reshape(-1))
    return np.concatenate(pieces)


def _kept(store: Store, match: Match) -> int:
    """Matched tokens, up to the first that the lowest tier does not have: what is in memory alone is soon gone.

    That is dropped, so that the next import saves it anew.
    """
    kept = match.tokens
    for pieces in match.pieces.values():
        entries = store._core.lowest.find([piece.name for piece in pieces])
        lost = [piece for piece, entry in zip(pieces, entries, strict=True) if entry is None]
        kept = min([kept, *(piece.start for piece in lost)])
        store._core.ram.remove([(piece.name.index_key, piece.name.key) for piece in lost], EvictReason.IMPORT)
    return kept


def _leave_to_disk(store: Store, match: Match) -> None:
    """Drop what the disk has from memory: a sequence never evicts its own head, and may be larger than `ram`."""
    core = store._core
    if core.nvme is None:
        return
    for pieces in match.pieces.values():
        names = [piece.name for piece in pieces]
        held = [name for name, entry in zip(names, core.nvme.find(names), strict=True) if _is_ready(entry)]
        core.ram.remove([(name.index_key, name.key) for name in held], EvictReason.IMPORT)


def _is_ready(entry: Entry | None) -> bool:
    return entry is not None and entry.state is State.READY


def _first(match: Match) -> tuple[Piece, ...]:
    return next(iter(match.pieces.values()), ())


def _payload(store: Store, space: Namespace, piece: Piece) -> Bytes:
    """A block's payload, cut to the tokens that matched. Raises NotFoundError."""
    layout, group = space.layout, piece.name.part.group
    size = slot_bytes(layout.payload_bytes(group))
    for tier, entry in _places(store, piece.name):
        payload = layout.payload_bytes(group, entry.tokens)
        image = _image(tier, entry, size)
        if image is None or not tier.unchanged([entry])[0]:
            continue
        if inspect_slot(image, entry.key, entry.tokens, payload, entry.checksum) is None:
            raw = image[HEADER_BYTES : HEADER_BYTES + payload]
            return cut(raw, layout.groups[group], layout.itemsize, entry.tokens, piece.take)
    raise NotFoundError(
        f"the block at token {piece.start} went away, or is damaged", "export again; kvstore verify tells of damage"
    )


def _places(store: Store, name: BlockName) -> Iterator[tuple[SlottedTier, Entry]]:
    """Where a block is, asked again each time, since blocks move."""
    for _ in range(ATTEMPTS):
        for tier in store._core.tiers:
            (entry,) = tier.find([name])
            if entry is not None and _is_ready(entry):
                yield tier, entry


def _image(tier: SlottedTier, entry: Entry, size: int) -> Bytes | None:
    """A slot's bytes; None where they cannot be read."""
    image = aligned_buffer(size)
    try:
        if isinstance(tier, RamTier):
            np.copyto(image, tier.slot(entry.ref, size))
        elif isinstance(tier, NvmeTier):
            tier.read([entry.ref], size, [image])
        else:
            return None
    except KVStoreError:
        return None
    return image
