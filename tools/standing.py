"""A store that stands already, opened as it is: with the budgets it was given, without making anything new.

Commands that look after a store must not change it by opening it: default settings would shrink or grow its budgets.
Also how people name a namespace or a stored sequence. Must not know what a command does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import kvstore
from kvstore import superblock
from kvstore.errors import AmbiguousError, FormatError, NotFoundError, OwnershipError, TokenError
from kvstore.events import Event, Notice
from kvstore.identity import Tokens, as_tokens
from kvstore.listing import NamespaceUse, Prefix
from kvstore.match import Match, Namespace
from kvstore.records import Entry, key_tokens
from kvstore.settings import Settings
from kvstore.store import Store
from kvstore.tiers.opening import Budget, on_record
from kvstore.tools import terminal
from kvstore.tools.standins import Spell, whole
from kvstore.transaction import Database

_PARENT, _SHORT = slice(12, 20), 8
MANY_BLOCKS = 20_000
LOSSES = frozenset(["segments dropped", "emptied"])
"""Subjects of notices that tell of stored blocks which were lost to damaged files, found when a store is opened."""
ID_DIGITS = 12
"""Hexadecimal digits of a root or a key that listings show."""


@contextmanager
def standing_store(path: Path | None, lost: list[str] | None = None) -> Iterator[Store]:
    """The store at ``path``, or where the settings say, opened with its own budgets.

    What opening found lost to damaged files is said on standard error, and added to ``lost``.
    Raises NotFoundError where there is none, SettingsError where none is named, and what `kvstore.open` raises.
    """
    settings = Settings.resolve(path)
    where = settings.path
    if not where.is_dir():
        there = os.path.lexists(where)
        problem = f"{where} is not a folder, and a store is one" if there else f"there is no store at {where}"
        raise NotFoundError(problem, "check --path and KVSTORE_PATH; kvstore.open() makes a store")
    try:
        present = (where / superblock.SUPERBLOCK).is_file()
    except PermissionError as error:
        raise OwnershipError(f"{where} cannot be read by this user", "run as the user the store belongs to") from error
    if not present:
        raise FormatError(f"{where} is not a store", "check --path and KVSTORE_PATH; kvstore.open() makes a store")
    superblock.prepare_directory(where)
    known = budgets(settings)
    ram = known["ram"].budget if "ram" in known else settings.ram
    nvme = known["nvme"].budget if "nvme" in known else 0
    found: list[str] = [] if lost is None else lost

    def told(event: Event) -> None:
        if isinstance(event, Notice) and event.subject in LOSSES:
            found.append(f"{event.subject}: {event.detail}")

    with kvstore.open(path, ram=ram, nvme=nvme, hbm=0, observers=[told]) as store:
        for line in found:
            terminal.say(line)
        yield store


@contextmanager
def reading(store: Store) -> Iterator[None]:
    """Says that the whole index is read, where that takes more than a moment."""
    if sum(usage.blocks for use in store.namespaces() for usage in use.by_tier.values()) < MANY_BLOCKS:
        yield
        return
    with terminal.progress() as step:
        step("read the index", 0, None)
        yield


def budgets(settings: Settings) -> dict[str, Budget]:
    """Of each tier that a store has, by its name, without opening it. Raises KVStoreError where it cannot be read."""
    home = superblock.ram_name(settings.path, superblock.read_store_id(settings.path))
    places = {"ram": settings.ram_directory / home, "nvme": settings.path / "nvme"}
    found = {name: on_record(directory, durable=name == "nvme") for name, directory in places.items()}
    return {name: one for name, one in found.items() if one is not None}


def find_namespace(store: Store, name: str, spell: Spell = whole) -> NamespaceUse:
    """The namespace with a label, or whose root as told begins with ``name``. Raises NotFoundError, AmbiguousError."""
    known = store.namespaces()
    found = [use for use in known if use.record.label == name] or [
        use for use in known if name and spell(use.record.root).startswith(name.lower())
    ]
    if not found:
        names = ", ".join(sorted({use.record.label or spell(use.record.root)[:ID_DIGITS] for use in known})) or "none"
        raise NotFoundError(f"the store has no namespace {name!r}", f"it has: {names}")
    if len(found) > 1:
        roots = ", ".join(spell(use.record.root)[:ID_DIGITS] for use in found)
        raise AmbiguousError(f"{name!r} names {len(found)} namespaces", f"use the beginning of a root: {roots}")
    return found[0]


def find_prefix(store: Store, use: NamespaceUse, name: str) -> Match:
    """The stored sequence that begins with tokens (``1,2,3``), or whose key begins with ``name``.

    Raises NotFoundError, AmbiguousError, TokenError.
    """
    space = Namespace(use.layout, use.record.root, use.record)
    if not name.strip(", "):
        raise TokenError("an empty prefix names nothing", "write its first tokens, or the beginning of its key")
    if "," in name:
        tokens = _tokens(name)
        match = store.match(space, tokens)
        if match.tokens < len(tokens):
            problem = f"only {match.tokens} of these {len(tokens)} tokens are stored"
            raise NotFoundError(problem, "kvstore ls NAMESPACE lists what is there")
        return match
    found = [prefix for prefix in store.prefixes(use.record.root) if prefix.key.hex().startswith(name.lower())]
    if not found:
        raise NotFoundError(
            f"no stored sequence has a key that begins with {name!r}", "kvstore ls NAMESPACE lists them"
        )
    if len(found) > 1:
        raise AmbiguousError(f"{name!r} begins {len(found)} keys", "use more digits")
    tokens = _walk_up(store, found[0])
    match = store.match(space, tokens)
    if match.tokens < len(tokens):
        problem = f"the sequence {name!r} is not whole: it has {len(tokens)} tokens, {match.tokens} are found"
        raise NotFoundError(problem, "name it by its first tokens instead, or evict the namespace")
    return match


def _walk_up(store: Store, prefix: Prefix) -> Tokens:
    """All tokens of a listed sequence, block by block from its last to its first."""
    pieces: dict[bytes, tuple[bytes, bytes]] = {}
    for tier in store._core.tiers:
        with tier.index.read() as txn:
            for index_key, raw in txn.scan(Database.BLOCKS):
                entry = Entry.unpack(raw)
                pieces[entry.key[:_SHORT]] = index_key[_PARENT], key_tokens(index_key, entry)
    found: list[bytes] = []
    short = prefix.key[:_SHORT]
    while short in pieces:
        short, tokens = pieces.pop(short)
        found.append(tokens)
    return as_tokens(np.frombuffer(b"".join(reversed(found)), ">u4"))


def _tokens(text: str) -> Tokens:
    try:
        return as_tokens([int(number) for number in text.split(",") if number.strip()])
    except ValueError as error:
        raise TokenError(f"{text!r} is not a list of token ids", "write them with commas: 1,2,3") from error
