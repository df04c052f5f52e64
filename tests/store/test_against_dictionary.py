"""The store played against a dictionary: any order of saves, loads, evictions, reopenings, faults and damage.

The model knows two things of every speaker: *possible*, what may be stored at most (the store must never serve more),
and *certain*, what must be served because nothing has happened that may lose it. Events say when something may have.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from known_kv import SPEAKERS, Speaker, open_small, shm

from kvstore.errors import BudgetError, NotFoundError
from kvstore.events import Cause, Event, Evicted, Fault, Notice, Skipped
from kvstore.identity import Extra
from kvstore.store import Store
from kvstore.tiers.fault import POSSIBLE, FaultMedium, FaultRule, Operation
from kvstore.tiers.medium import Medium

TRUNKS = np.random.default_rng(7).integers(0, 3, (3, 150)).tolist()
LOSSY = {"lru", "recut", "quota", "corrupt", "expired", "dead owner", "shrink"}
SPARES_PINS = {"lru", "recut", "quota"}
FAULTS = [(operation, effect) for operation in Operation for effect in sorted(POSSIBLE[operation])]
Sequence_ = tuple[int, ...]
Mark = tuple[int, int] | None


def sequence(trunk: int, cut: int, tail: list[int]) -> Sequence_:
    return (*TRUNKS[trunk][:cut], *tail)


sequences = st.builds(
    sequence,
    st.integers(0, len(TRUNKS) - 1),
    st.sampled_from([100, 64, 150, 33, 16, 17, 129, 80, 7, 0, 128]),
    st.lists(st.integers(0, 3), max_size=20),
).filter(bool)
"""Conversations that share beginnings and part ways in the middle of blocks."""
speakers = st.sampled_from(SPEAKERS)
extras = st.sampled_from([None, None, None, (0, 1), (1, 1), (1, 2), (3, 1)])
tiers = st.sampled_from(["ram", "nvme"])


def common(a: Sequence[int], b: Sequence[int]) -> int:
    for at, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return at
    return min(len(a), len(b))


class StoreAgainstDictionary(RuleBasedStateMachine):
    """budgets: of `ram` and `nvme`. faults: whether media break and bytes turn over."""

    budgets: tuple[str, str] = ("2MiB", "3MiB")
    faults = False

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="kvstore-test-"))
        self.memory = Path(tempfile.mkdtemp(prefix="kvstore-test-", dir=shm()))
        self.media: dict[str, FaultMedium] = {}
        self.broken = False
        self.possible: dict[Speaker, set[Sequence_]] = {speaker: set() for speaker in SPEAKERS}
        self.certain: dict[Speaker, set[Sequence_]] = {speaker: set() for speaker in SPEAKERS}
        self.pinned: dict[str, tuple[Speaker, Sequence_]] = {}
        self.quotas: dict[tuple[str, str], int] = {}
        self.damaged = False
        self.unmoved = False
        """Some block may be in `ram` alone, pinned or not."""
        self.asked = 0
        self.store: Store | None = None

    @initialize()
    def open(self) -> None:
        ram, nvme = self.budgets
        self.store = open_small(
            self.directory / "kv",
            self.memory,
            ram=ram,
            nvme=nvme,
            wrap=self._wrap,
            observers=[self._watch],
        )

    @property
    def kv(self) -> Store:
        assert self.store is not None
        return self.store

    def _wrap(self, medium: Medium) -> Medium:
        self.media[medium.name] = FaultMedium(medium)
        return self.media[medium.name]

    def _watch(self, event: Event) -> None:
        match event:
            case Evicted(_, reason, _) if reason in LOSSY:
                self._lost(pins=reason not in SPARES_PINS)
            case Skipped(tier, _, _):
                self._lost(pins=False)
                self.unmoved |= tier == "nvme"
            case Fault():
                self._lost(pins=True)
            case Notice(subject, _) if subject in ("emptied", "segments dropped"):
                raise AssertionError(f"nothing was lost, and the store says {event}")

    def _lost(self, *, pins: bool) -> None:
        """Nothing is certain any more; pins are, unless something worse than eviction happened."""
        for sure in self.certain.values():
            sure.clear()
        if pins:
            self.pinned = {}
            self.unmoved = True

    # ---------------------------------------------------------------- saving and loading

    @rule(speaker=speakers, tokens=sequences, extra=extras, flush=st.booleans())
    def save(self, speaker: Speaker, tokens: Sequence_, extra: Mark, flush: bool) -> None:
        known, marks = self._marked(speaker, tokens, extra)
        space = self.kv.namespace(speaker.layout, salt=speaker.salt)
        done = self.kv.save(space, tokens, speaker.made(known), extras=marks)
        parts = len(list(speaker.layout.parts()))
        blocks = -(-len(tokens) // speaker.layout.block_tokens)
        assert done.new_blocks + done.known_blocks + done.skipped_blocks == blocks * parts
        self.possible[speaker].add(known)
        if not done.skipped_blocks and not self.broken and not self.damaged:
            self.certain[speaker].add(known)
        if flush:
            self.flush()

    @precondition(lambda self: any(self.possible.values()))
    @rule(at=st.integers(0, 2**16), cut=st.none() | st.integers(1, 160), tail=st.lists(st.integers(0, 3), max_size=20))
    def load_something_saved(self, at: int, cut: int | None, tail: list[int]) -> None:
        known = sorted((SPEAKERS.index(who), one) for who, some in self.possible.items() for one in some)
        who, one = known[at % len(known)]
        plain = tuple(token for token in one[:cut] if token < 1000)
        if plain:
            self.load(SPEAKERS[who], (*plain, *tail), None, None)

    @rule(speaker=speakers, tokens=sequences, extra=extras, limit=st.none() | st.integers(0, 160))
    def load_anything(self, speaker: Speaker, tokens: Sequence_, extra: Mark, limit: int | None) -> None:
        self.load(speaker, tokens, extra, limit)

    @rule(speaker=speakers, seed=st.integers(0, 3))
    def save_more_than_fits(self, speaker: Speaker, seed: int) -> None:
        """Fifteen conversations that nobody else has."""
        for tokens in np.random.default_rng(seed).integers(5, 9, (15, 150)).tolist():
            self.save(speaker, tuple(tokens), None, flush=False)

    def load(self, speaker: Speaker, tokens: Sequence_, extra: Mark, limit: int | None) -> None:
        known, marks = self._marked(speaker, tokens, extra)
        space = self.kv.namespace(speaker.layout, salt=speaker.salt)
        found = self.kv.match(space, tokens, limit=limit, extras=marks)
        blank = speaker.blank(max(1, found.tokens))
        got = self.kv.load(found, blank.buffers)
        self.asked += len(tokens)
        assert blank.wrong(known, got.tokens) == 0
        most = len(tokens) if limit is None else min(limit, len(tokens))
        assert got.tokens <= found.tokens <= min(most, self._longest(self.possible[speaker], known))
        assert sum(got.by_tier.values()) == got.tokens
        if got.stop is Cause.CHANGED:
            # What shared most tokens went between match and load; what is certain or pinned may share fewer.
            self.load(speaker, tokens, extra, limit)
            return
        if not self.damaged and not self.broken:
            assert got.tokens >= min(most, self._longest(self.certain[speaker], known))
            kept = [named for who, named in self.pinned.values() if who == speaker]
            assert got.tokens >= min(most, self._longest(kept, known))

    @rule(speaker=speakers, tokens=sequences)
    def prefetch(self, speaker: Speaker, tokens: Sequence_) -> None:
        found = self.kv.match(self.kv.namespace(speaker.layout, salt=speaker.salt), tokens)
        under_way = self.kv.prefetch(found)
        assert under_way.wait(60)
        assert under_way.tokens <= found.tokens

    @rule()
    def flush(self) -> None:
        """All is moved or given up, unless the mover waits after faults of a medium, also of one healed since."""
        if not self.kv.flush(60):
            assert self.unmoved, "nothing was given up"
            assert not self.kv.stats().mover_blocks or (self.faults and self.kv.stats().mover_paused)

    # ---------------------------------------------------------------- pins and quotas

    @precondition(lambda self: any(self.possible.values()))
    @rule(name=st.sampled_from(["x", "y"]), at=st.integers(0, 2**16), cut=st.none() | st.integers(1, 160))
    def pin_something_saved(self, name: str, at: int, cut: int | None) -> None:
        known = sorted((SPEAKERS.index(who), one) for who, some in self.possible.items() for one in some)
        who, one = known[at % len(known)]
        self.pin(name, SPEAKERS[who], tuple(token for token in one[:cut] if token < 1000))

    def pin(self, name: str, speaker: Speaker, tokens: Sequence_) -> None:
        space = self.kv.namespace(speaker.layout, salt=speaker.salt)
        found = self.kv.match(space, tokens)
        try:
            record = self.kv.pin(name, space, tokens)
        except NotFoundError:  # what was found has gone since: a bad block is dropped in the background
            assert not self.kv.match(space, tokens).tokens
        except BudgetError:
            assert found.tokens
        else:
            self.pinned.pop(name, None)
            if not self.broken and not self.damaged:
                self.pinned[name] = (speaker, tokens[: len(record.tokens) // 4])

    def unpin(self, name: str) -> None:
        if name in self.kv.names():
            self.kv.unpin(name)
        else:
            with pytest.raises(NotFoundError):
                self.kv.unpin(name)
        self.pinned.pop(name, None)

    def quota(self, salt: str, tier: str, slots: int | None) -> None:
        limit = None if slots is None else slots * 12288
        self.kv.flush(60)
        limits = {name: self.quotas.get((salt, name)) for name in ("ram", "nvme")} | {tier: limit}
        self.kv.set_quota(salt, ram=limits["ram"], nvme=limits["nvme"])
        if limit is None:
            self.quotas.pop((salt, tier), None)
        else:
            self.quotas[salt, tier] = limit
            self.held_before = {**getattr(self, "held_before", {}), (salt, tier): self._held(salt, tier)}

    @invariant()
    def no_salt_exceeds_its_quota(self) -> None:
        if self.store is not None:
            for (salt, tier), limit in self.quotas.items():
                assert self._held(salt, tier) <= max(limit, self.held_before[salt, tier])

    # ---------------------------------------------------------------- what comes rarely

    @precondition(lambda self: any(self.possible.values()))
    @rule(at=st.integers(0, 2**16), cut=st.integers(1, 97), tail=st.lists(st.integers(0, 3), max_size=40))
    def evict_beside_a_save(self, at: int, cut: int, tail: list[int]) -> None:
        """A conversation is evicted while what continues it is saved: before it has slots, or when all is copied."""
        known = sorted((SPEAKERS.index(who), one) for who, some in self.possible.items() for one in some)
        speaker, one = SPEAKERS[known[at % len(known)][0]], known[at % len(known)][1]
        plain = tuple(token for token in one if token < 1000)
        tokens, gone = (*plain, *tail), plain[:cut]
        if not gone:
            return
        ram, step = self.kv._core.ram, ("reserve", "publish")[at % 2]
        real = getattr(ram, step)

        def evicting(*given: Any, **named: Any) -> Any:
            vars(ram).pop(step, None)
            self.possible[speaker].add(tokens)
            self.evict_prefix(speaker, gone)
            return real(*given, **named)

        setattr(ram, step, evicting)
        self.kv.save(self.kv.namespace(speaker.layout, salt=speaker.salt), tokens, speaker.made(tokens))
        if vars(ram).pop(step, None):  # all was known, or nothing could be had
            self.possible[speaker].add(tokens)

    @precondition(lambda self: any(self.possible.values()))
    @rule(
        what=st.sampled_from(["evict", "evict tier", "reopen", "quota", "unpin", "upset"]),
        how=st.integers(0, 2**16),
        speaker=speakers,
        tier=tiers,
        salt=st.sampled_from(["a", "b"]),
        name=st.sampled_from(["x", "y"]),
        slots=st.sampled_from([None, 20, 10, 5, 0]),
    )
    def administer(
        self, what: str, how: int, speaker: Speaker, tier: str, salt: str, name: str, slots: int | None
    ) -> None:
        match what:
            case "evict":
                self._evict(how, speaker, salt)
            case "evict tier":
                self.evict_tier(tier)
            case "reopen":
                self.reopen(how % 3 == 0)
            case "quota":
                self.quota(salt, tier, slots)
            case "unpin":
                self.unpin(name)
            case "upset" if self.faults:
                self._upset(how, tier)

    def _evict(self, how: int, speaker: Speaker, salt: str) -> None:
        known = sorted(self.possible[speaker])
        if how % 4 or not known:
            if known:
                one = known[how % len(known)]
                self.evict_prefix(speaker, tuple(token for token in one[: 1 + how % 97] if token < 1000))
        elif how % 3 == 0:
            self.evict_everything()
        elif how % 3 == 1:
            self.evict_namespace(speaker)
        else:
            self.evict_salt(salt)

    def _upset(self, how: int, tier: str) -> None:
        if self.broken:
            self.heal_medium()
        elif how % 2:
            self.break_medium(tier, how // 2)
        else:
            self.flip_a_byte(how * 7919, tier)

    # ---------------------------------------------------------------- eviction

    def evict_everything(self) -> None:
        self.kv.evict(everything=True)
        self._gone(SPEAKERS)

    def evict_namespace(self, speaker: Speaker) -> None:
        self.kv.evict(namespace=self.kv.namespace(speaker.layout, salt=speaker.salt).root)
        self._gone([speaker])

    def evict_salt(self, salt: str) -> None:
        self.kv.evict(salt=salt)
        self._gone([speaker for speaker in SPEAKERS if speaker.salt == salt])

    def evict_prefix(self, speaker: Speaker, tokens: Sequence_) -> None:
        found = self.kv.match(self.kv.namespace(speaker.layout, salt=speaker.salt), tokens)
        counted = self.kv.evict(prefix=found, dry_run=True)
        assert found.tokens == 0 or sum(counted.values()) > 0
        self.kv.evict(prefix=found)
        if not found.tokens:
            return
        gone, block = tokens[: found.tokens], speaker.layout.block_tokens
        kept = (found.tokens - 1) // block * block
        self.possible[speaker] = {
            known[:kept] if known[: len(gone)] == gone else known for known in self.possible[speaker]
        }

        def touched(known: Sequence_) -> bool:
            return known[: len(gone)] == gone or (gone[: len(known)] == known and len(known) % block == 0)

        self.certain[speaker] = {known for known in self.certain[speaker] if not touched(known)}
        self.pinned = {
            name: (who, known)
            for name, (who, known) in self.pinned.items()
            if who != speaker or not common(known, gone)
        }

    def evict_tier(self, tier: str) -> None:
        if tier not in [known.name for known in self.kv.stats().tiers]:
            return
        self.flush()
        whole = not self.broken and tier == "ram" and self.budgets[1] != "0"
        self.kv.evict(everything=True, tier=tier)
        if not whole or self.unmoved:
            self._lost(pins=True)

    # ---------------------------------------------------------------- reopening, faults, damage

    def reopen(self, emptied: bool) -> None:
        self.kv.close()
        if emptied:
            for part in self.memory.iterdir():
                shutil.rmtree(part)
            self.asked = 0
            if self.broken or self.unmoved:
                self._lost(pins=True)
            if self.budgets[1] == "0":
                self._gone(SPEAKERS)
                self.quotas = {}
        self.open()

    def break_medium(self, tier: str, how: int) -> None:
        """Some operation of a medium fails from now on, loudly or not, always or half of the time."""
        self.kv.flush(60)
        operation, effect = FAULTS[how % len(FAULTS)]
        if tier in self.media:
            self.media[tier].inject([FaultRule(operation, effect, probability=(1.0, 0.5)[how % 2])])
            self.broken = self.damaged = True
            self._lost(pins=True)

    def heal_medium(self) -> None:
        self.kv.flush(60)
        for medium in self.media.values():
            medium.inject()
        self.broken = False
        self._lost(pins=True)

    def flip_a_byte(self, where: int, tier: str) -> None:
        self.kv.flush(60)
        folder = next(self.memory.iterdir()) if tier == "ram" else self.directory / "kv" / "nvme"
        files = sorted(folder.glob("*.seg"))
        if files:
            file = files[where % len(files)]
            at = where % file.stat().st_size
            with file.open("r+b") as raw:
                raw.seek(at)
                byte = raw.read(1)[0]
                raw.seek(at)
                raw.write(bytes([byte ^ 0x40]))
            self.damaged = True
            self._lost(pins=True)

    @rule()
    def verify(self) -> None:
        if not self.damaged and not self.broken:
            assert self.kv.verify().problems == []

    def teardown(self) -> None:
        try:
            if self.store is not None:
                self.heal_medium()
                if self.damaged:
                    self.kv.verify(repair=True)
                assert self.kv.verify().problems == []
                stats = self.kv.stats()
                assert stats.asked_tokens == self.asked
                assert sum(stats.hit_tokens.values()) + sum(stats.miss_tokens.values()) == self.asked
                assert all(tier.allocated_bytes <= tier.budget_bytes for tier in stats.tiers)
                self.kv.close()
        finally:
            shutil.rmtree(self.directory)
            shutil.rmtree(self.memory)

    # ---------------------------------------------------------------- inside

    def _marked(self, speaker: Speaker, tokens: Sequence_, extra: Mark) -> tuple[Sequence_, tuple[Extra, ...]]:
        """Tokens as the model knows them, other ones where an extra says so, and the extras for the store."""
        block = speaker.layout.block_tokens
        if extra is None or extra[0] * block >= len(tokens):
            return tokens, ()
        index, content = extra
        span = range(index * block, (index + 1) * block)
        known = tuple(token + 1000 * content if at in span else token for at, token in enumerate(tokens))
        return known, (Extra(index, bytes([content])),)

    def _longest(self, stored: Iterable[Sequence_], wanted: Sequence_) -> int:
        return max((common(one, wanted) for one in stored), default=0)

    def _held(self, salt: str, tier: str) -> int:
        roots = {self.kv.namespace(one.layout, salt=salt).root for one in SPEAKERS if one.salt == salt}
        chosen = [one for one in self.kv._core.tiers if one.name == tier]
        return sum(use.size for one in chosen for root, use in one.usage().items() if root in roots)

    def _gone(self, whose: Iterable[Speaker]) -> None:
        for speaker in whose:
            self.possible[speaker].clear()
            self.certain[speaker].clear()
            self.pinned = {name: pin for name, pin in self.pinned.items() if pin[0] != speaker}


@pytest.mark.parametrize(
    ("ram", "nvme", "faults", "examples"),
    [
        ("3MiB", "4MiB", False, 15),
        ("1600KiB", "2MiB", False, 8),
        ("2MiB", "0", False, 8),
        ("2MiB", "3MiB", True, 12),
    ],
)
@pytest.mark.slow
def test_store_serves_what_a_dictionary_would(ram: str, nvme: str, faults: bool, examples: int) -> None:
    machine = type("Machine", (StoreAgainstDictionary,), {"budgets": (ram, nvme), "faults": faults})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
