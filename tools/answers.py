"""What commands and the API answer alike: questions to a store and changes of it, as plain values that JSON holds.

Must not know a terminal, a request, or where an argument came from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore.errors import NotFoundError, SettingsError
from kvstore.eviction import Selection
from kvstore.header import slot_bytes
from kvstore.identity import Tokens as Ids
from kvstore.identity import salt_digest
from kvstore.listing import NamespaceUse
from kvstore.match import Match, Namespace
from kvstore.sizes import format_size, parse_size
from kvstore.store import Store
from kvstore.tools.naming import Named, find_named, named, namespaces_for
from kvstore.tools.standing import ID_DIGITS, find_namespace, find_prefix
from kvstore.tools.standins import Spell, whole
from kvstore.verification import Report

FIRST_TOKENS = 32
OFF = "off"


def namespace_told(use: NamespaceUse, spell: Spell = whole) -> dict[str, Any]:
    """A namespace, and what it holds in each tier."""
    record = use.record
    return {
        "root": spell(record.root),
        "label": record.label,
        "salt": spell(record.salt),
        "created": record.created,
        "ttl": record.ttl,
        "block_tokens": use.layout.block_tokens,
        "token_bytes": use.layout.sequence_bytes(1),
        "tiers": {tier: {"blocks": usage.blocks, "bytes": usage.size} for tier, usage in use.by_tier.items()},
    }


def names(store: Store, spell: Spell = whole) -> dict[str, Any]:
    """All named prefixes."""
    return {"names": [one.to_dict(spell) for one in named(store)]}


def show(store: Store, space: Namespace, ids: Ids) -> dict[str, Any]:
    """One prefix: how many of its tokens are stored in which tier, its blocks and bytes, and its names."""
    match = store.match(space, ids)
    own = [one for one in named(store) if one.record.root == space.root and _begins(one, match)]
    return {
        "namespace": space.root.hex(),
        "label": space.label,
        "tokens": len(ids),
        "stored": match.tokens,
        "by_tier": match.by_tier,
        "blocks": _blocks(match),
        "bytes": match.tokens * sum(space.layout.token_bytes(part.group) for part in match.pieces),
        "key": match.chain.keys[-1].hex() if match.chain.keys else None,
        "names": [one.to_dict() for one in own],
        "first_tokens": ids[:FIRST_TOKENS].tolist(),
        "text": None,
    }


def pin(
    store: Store, name: str, space: Namespace, ids: Ids, *, priority: int, ttl: int | None, partial: bool
) -> dict[str, Any]:
    """Name a prefix and keep it. partial: what is there of it will do. Raises NotFoundError, BudgetError."""
    found = store.match(space, ids)
    if found.tokens < len(ids) and not partial:
        problem = f"only {found.tokens} of {len(ids)} tokens are stored"
        raise NotFoundError(problem, "ask kvstore explain why, or pin what is there with --partial")
    store.pin(name, space, ids, priority=priority, ttl=ttl)
    return {**find_named(store, name).to_dict(), "asked": len(ids)}


def unpin(store: Store, name: str) -> dict[str, Any]:
    """Forget a name and its pin. Raises NotFoundError."""
    was = find_named(store, name)
    store.unpin(name)
    return {"name": name, "unpinned": was.pinned, "tokens": was.tokens}


def eviction_target(
    store: Store,
    *,
    everything: bool = False,
    tier: str | None = None,
    namespace: str | None = None,
    prefix: str | None = None,
    name: str | None = None,
    salt: str | None = None,
    unused: float | None = None,
    larger: str | None = None,
) -> Selection:
    """The arguments of `Store.evict` that options name.

    prefix: first tokens (``1,2,3``), or the beginning of a key. larger: a size. Raises SettingsError for nothing, or
    for two things; NotFoundError, AmbiguousError.
    """
    given = [everything, *(one is not None for one in (namespace, name, salt, unused, larger))]
    if prefix is not None and namespace is None:
        raise SettingsError("--prefix needs the namespace it is in", "add --namespace; kvstore ls lists them")
    if sum(given) > 1:
        raise SettingsError(
            "--all, --namespace, --name, --salt, --unused and --larger exclude one another",
            "evict twice to combine them",
        )
    if namespace is not None:
        use = find_namespace(store, namespace)
        return {"prefix": find_prefix(store, use, prefix)} if prefix is not None else {"namespace": use.record.root}
    if name is not None:
        return {"name": find_named(store, name).name}
    if salt is not None:
        namespaces_for(store, None, salt)
        return {"salt": salt}
    if unused is not None:
        return {"unused_s": unused}
    if larger is not None:
        return {"larger": parse_size(larger)}
    if everything or tier is not None:
        return {"everything": True}
    raise SettingsError(
        "nothing was named", "pass --all, --tier, --namespace, --prefix, --name, --salt, --unused or --larger"
    )


def eviction_counted(store: Store, target: Selection, tier: str | None, wipe: bool = False) -> dict[str, Any]:
    """What `evict` would do: blocks by tier; names of prefixes that lose blocks, and those that are forgotten.

    With a tier alone no prefix is lost: what it drops may be in another, and pins stay.
    """
    blocks = store.evict(**target, tier=tier, dry_run=True)
    names = store.losing(**target) if tier is None else []
    forgotten = names if wipe else [name for name in names if name == target.get("name")]
    return {"blocks": blocks, "names": names, "forgotten": forgotten}


def evict(store: Store, target: Selection, tier: str | None, wipe: bool = False) -> dict[str, int]:
    """Evict, and forget the name that named it; blocks by tier. wipe: forget every name of what goes."""
    counts = store.evict(**target, tier=tier, forget_names=wipe)
    if (name := target.get("name")) is not None and tier is None and not wipe:
        store.unpin(name)
    return counts


def set_quota(store: Store, salt: str, ram: str | None, nvme: str | None, dry_run: bool) -> dict[str, Any]:
    """What a salt may hold, and the blocks evicted to come down to it; with no tier named, only told.

    ram, nvme: a size, ``off`` for none, None for what there is. Raises SettingsError, NotFoundError.
    """
    limits = {tier: _limit(text) for tier, text in (("ram", ram), ("nvme", nvme)) if text is not None}
    _refuse_less_than_a_block(store, salt, limits)
    known = _is_known(store, salt_digest(salt))
    evicted = store.set_quota(salt, **limits, dry_run=dry_run) if limits else {}
    changed = bool(limits) and not dry_run
    return {
        "quotas": quotas_told(store, salt, known=not limits),
        "known": known,
        "changed": changed,
        "dry_run": dry_run,
        "evicted": evicted,
    }


def _refuse_less_than_a_block(store: Store, salt: str, limits: Mapping[str, int | None]) -> None:
    """Raises SettingsError for a quota that keeps everything out without saying so, as 0 does."""
    uses = [use for use in store.namespaces() if use.record.salt == salt_digest(salt)]
    slots = [slot_bytes(use.layout.payload_bytes(group)) for use in uses for group in range(len(use.layout.groups))]
    least = min(slots, default=slot_bytes(1))
    for tier, limit in limits.items():
        if limit is not None and 0 < limit < least:
            raise SettingsError(
                f"a quota of {format_size(limit)} in {tier} is less than one block, which takes {format_size(least)}",
                "give a size with a unit, such as 1GiB; 0 keeps everything out, off takes the quota off",
            )


def set_ttl(store: Store, name: str, ttl: int | None) -> dict[str, Any]:
    """A namespace by its label or the beginning of its root, once its TTL is set. ttl: 0 for none, None for what it is.

    Raises NotFoundError, AmbiguousError.
    """
    root = find_namespace(store, name).record.root
    if ttl is not None:
        store.set_ttl(root, ttl)
    return namespace_told(next(use for use in store.namespaces() if use.record.root == root))


def drop_empty(store: Store, dry_run: bool) -> dict[str, Any]:
    """Namespaces without blocks and names, forgotten."""
    gone = store.drop_empty(dry_run=dry_run)
    listed = [{"root": one.root.hex(), "label": one.label, "salt": one.salt.hex()} for one in gone]
    return {"dropped": bool(gone) and not dry_run, "dry_run": dry_run, "namespaces": listed}


def _is_known(store: Store, salt: bytes) -> bool:
    """Whether anything is stored under a salt, by its digest, or was allowed it."""
    return any(use.record.salt == salt for use in store.namespaces()) or any(use.salt == salt for use in store.quotas())


def quotas_told(store: Store, salt: str | None, spell: Spell = whole, *, known: bool = True) -> list[dict[str, Any]]:
    """Quotas with what is held of each, all or those of one salt. known: raises NotFoundError where it has nothing."""
    labels: dict[bytes, list[str]] = {}
    for use in store.namespaces():
        labels.setdefault(use.record.salt, []).append(use.record.label or spell(use.record.root)[:ID_DIGITS])
    wanted = salt_digest(salt) if salt is not None else None
    if known and wanted is not None and not _is_known(store, wanted):
        raise NotFoundError(f"nothing is stored under the salt {salt!r}, and it has no quota", "check the salt")
    return [
        {
            "salt": spell(use.salt),
            "labels": ", ".join(labels.get(use.salt, [])),
            "tier": use.tier,
            "limit_bytes": use.limit,
            "used_bytes": use.used,
        }
        for use in store.quotas()
        if wanted in (None, use.salt)
    ]


def verified(report: Report) -> dict[str, Any]:
    """What `Store.verify` found."""
    return {"ok": report.ok, "checked": report.checked, "repaired": report.repaired, "problems": report.problems}


def _limit(text: str) -> int | None:
    return None if text.lower() == OFF else parse_size(text)


def _begins(one: Named, match: Match) -> bool:
    """Whether a named prefix is one of the matched tokens."""
    return match.chain.tokens[: one.tokens].astype("<u4").tobytes() == one.record.tokens


def _blocks(match: Match) -> dict[str, int]:
    """Matched blocks by the tier that would serve them, in all parts."""
    found: dict[str, int] = {}
    for pieces in match.pieces.values():
        for piece in pieces:
            found[piece.tier] = found.get(piece.tier, 0) + 1
    return found
