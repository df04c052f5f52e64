"""Whether a tier's books agree: every slot free, WRITING by a live owner, or READY exactly once; bytes and counters.

`check` only reads, and may run beside any number of writers: it works on one snapshot, and what depends on the arrays
is looked at again before it is called wrong. `rebuild` is what the first opener after a restart of the host does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from kvstore.errors import DamagedError
from kvstore.records import Entry, Segment, Usage, parse_slot_key, slot_key
from kvstore.slots import FreeMap, SlotRef
from kvstore.states import State
from kvstore.tiers import ledger, namespaces, segments
from kvstore.tiers.arrays import arrays_bytes, arrays_path
from kvstore.tiers.medium import file_length, segment_number, segment_path
from kvstore.tiers.slotted import STAMP_BASE, SlottedTier
from kvstore.transaction import Database, Transaction, get_number, put_number


def check(tier: SlottedTier, live: Collection[bytes]) -> list[str]:
    """Everything that is wrong with a tier's books, in words. live: owners that may be writing."""
    with tier.index.read() as txn:
        cut = {segment.number: segment for segment in ledger.segments(txn)}
        problems, used, ready = _entries(txn, cut, live)
        problems += _slots(txn, used)
        problems += _bitmaps(cut, used)
        problems += _counters(txn, cut, used)
    problems += [
        f"segment {segment.number}: {why}" for segment in cut.values() if (why := missing_files(tier, segment))
    ]
    if not problems:
        problems += _generations(tier, ready)
    return [f"{tier.name}: {problem}" for problem in problems]


def _entries(
    txn: Transaction, cut: dict[int, Segment], live: Collection[bytes]
) -> tuple[list[str], dict[SlotRef, Entry], list[tuple[bytes, Entry]]]:
    problems: list[str] = []
    used: dict[SlotRef, Entry] = {}
    ready: list[tuple[bytes, Entry]] = []
    for index_key, raw in txn.scan(Database.BLOCKS):
        try:
            entry = Entry.unpack(raw)
        except DamagedError as error:
            problems.append(error.problem)
            continue
        segment = cut.get(entry.ref.segment)
        if segment is None or entry.ref.slot >= segment.slots:
            problems.append(f"a block lies in {entry.ref}, which does not exist")
        if entry.ref in used:
            problems.append(f"two blocks lie in {entry.ref}")
        used[entry.ref] = entry
        if txn.get(Database.SLOTS, slot_key(entry.ref)) != index_key:
            problems.append(f"{entry.ref} does not name the block that lies in it")
        marked = txn.get(Database.WRITING, entry.owner + slot_key(entry.ref)) is not None
        if entry.state is State.READY:
            ready.append((index_key, entry))
        elif not marked or entry.owner not in live:
            problems.append(f"{entry.ref} is being written by nobody who lives")
    return problems, used, ready


def _slots(txn: Transaction, used: dict[SlotRef, Entry]) -> list[str]:
    problems = [
        f"{parse_slot_key(key)} is taken by a block that is not there"
        for key, _ in txn.scan(Database.SLOTS)
        if parse_slot_key(key) not in used
    ]
    writing = {ref for ref, entry in used.items() if entry.state is State.WRITING}
    marked = {parse_slot_key(key[16:]) for key, _ in txn.scan(Database.WRITING)}
    problems += [f"{ref} is marked as being written, and is not" for ref in sorted(marked - writing)]
    return problems


def _bitmaps(cut: dict[int, Segment], used: dict[SlotRef, Entry]) -> list[str]:
    problems: list[str] = []
    taken: dict[int, set[int]] = {}
    for ref in used:
        taken.setdefault(ref.segment, set()).add(ref.slot)
    for segment in cut.values():
        free = set(FreeMap.unpack(segment.bitmap, segment.slots).slots())
        mine = taken.get(segment.number, set())
        problems += [f"slot {slot} of segment {segment.number} is both free and used" for slot in sorted(free & mine)]
        lost = set(range(segment.slots)) - free - mine
        problems += [f"slot {slot} of segment {segment.number} is leaked" for slot in sorted(lost)]
    return problems


def _counters(txn: Transaction, cut: dict[int, Segment], used: dict[SlotRef, Entry]) -> list[str]:
    problems: list[str] = []
    blocks: Counter[int] = Counter()
    held: Counter[int] = Counter()
    for entry in used.values():
        blocks[entry.namespace] += 1
        held[entry.namespace] += cut[entry.ref.segment].slot_bytes if entry.ref.segment in cut else 0
    for number, _ in namespaces.listing(txn):
        usage = Usage.unpack(txn.get(Database.USAGE, number.to_bytes(4, "big")))
        if usage != Usage(blocks[number], held[number]):
            problems.append(f"namespace {number} holds {blocks[number]} blocks, its counter says {usage.blocks}")
    for segment in cut.values():
        key = segment.slot_bytes.to_bytes(4, "big") + segment.number.to_bytes(4, "big")
        free = FreeMap.unpack(segment.bitmap, segment.slots).free
        if int.from_bytes(txn.get(Database.FREE, key) or b"", "big") != (0 if segment.allocating else free):
            problems.append(f"segment {segment.number} has {free} free slots, its counter says otherwise")
    sizes = sum(segment.size + arrays_bytes(segment.size) for segment in cut.values())
    counted = get_number(txn, segments.ALLOCATED)
    fixed = get_number(txn, segments.FIXED)
    if counted != sizes + fixed:
        problems.append(f"{sizes + fixed} bytes are allocated, the counter says {counted}")
    if counted > get_number(txn, segments.BUDGET):
        problems.append(f"{counted} bytes are allocated, the budget is {get_number(txn, segments.BUDGET)}")
    return problems


def _generations(tier: SlottedTier, ready: list[tuple[bytes, Entry]]) -> list[str]:
    same = tier.unchanged([entry for _, entry in ready])
    doubtful = [item for item, ok in zip(ready, same, strict=True) if not ok or not _stamp(tier, item[1].ref)]
    problems: list[str] = []
    with tier.index.read() as txn:
        for index_key, entry in doubtful:
            raw = txn.get(Database.BLOCKS, index_key)
            if raw is None or Entry.unpack(raw) != entry:
                continue
            if not tier.unchanged([entry])[0]:
                problems.append(f"{entry.ref} has another generation than its block")
            elif not _stamp(tier, entry.ref):
                problems.append(f"{entry.ref} has no stamp: its block would never be evicted")
    return problems


def _stamp(tier: SlottedTier, ref: SlotRef) -> int:
    return int(tier.arrays.of(ref.segment).stamps[ref.slot])


def missing_files(tier: SlottedTier, segment: Segment) -> str | None:
    """What is wrong with a segment's files, None when they are there and long enough."""
    if segment.allocating:
        return None
    arrays = arrays_path(tier.directory, segment.number)
    for path, length, size in (
        (segment_path(tier.directory, segment.number), tier.medium.length(segment.number), segment.size),
        (arrays, file_length(arrays), arrays_bytes(segment.size)),
    ):
        if length is not None and length < size:
            return f"{path.name} is missing" if length < 0 else f"{path.name} has {length} bytes instead of {size}"
    return None


def drop_segments(tier: SlottedTier, numbers: Collection[int]) -> int:
    """Forget segments whose files are damaged, with all their blocks. Returns how many blocks went."""

    def work(txn: Transaction) -> int:
        removal = ledger.Removal(txn)
        count = 0
        for index_key, raw in list(txn.scan(Database.BLOCKS)):
            entry = Entry.unpack(raw)
            if entry.ref.segment in numbers:
                removal.drop(index_key, entry, free=False)
                count += 1
        removal.flush()
        for segment in ledger.segments(txn):
            if segment.number in numbers:
                segments.drop_segment(txn, segment)
        return count

    gone = tier.index.write(work)
    for number in numbers:
        tier.medium.remove(number)
        tier.arrays.remove(number)
    return gone


def sweep(tier: SlottedTier) -> int:
    """Delete files of segments that the index does not know; a crash can leave some. Only where nobody else writes."""
    known = {segment.number for segment in tier.segment_list()}
    strange = {number for file in tier.directory.iterdir() if (number := segment_number(file)) is not None} - known
    for number in strange:
        tier.medium.remove(number)
        tier.arrays.remove(number)
    return len(strange)


def rebuild(tier: SlottedTier) -> None:
    """After a restart of the host: make generations what the entries say, and let new stamps follow the old ones."""
    largest = 0
    with tier.index.read() as txn:
        known = ledger.segments(txn)
        entries = [Entry.unpack(raw) for _, raw in txn.scan(Database.BLOCKS)]
    for segment in known:
        if not segment.allocating:
            stamps = tier.arrays.of(segment.number).stamps
            stamps[segment.slots :] = 0
            largest = max(largest, int(stamps[: segment.slots].max(initial=0)))
    for entry in entries:
        arrays = tier.arrays.of(entry.ref.segment)
        arrays.generations[entry.ref.slot] = entry.generation
        if not arrays.stamps[entry.ref.slot]:
            arrays.stamps[entry.ref.slot] = 1
    tier.index.write(lambda txn: put_number(txn, STAMP_BASE, largest))
