"""How people name what is stored: a file, text, token ids, a name, or the beginning of a key, as tokens of a namespace.

Also a named prefix beside what is still there of it. Must not know how a command shows either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore.errors import AmbiguousError, KVStoreError, NotFoundError, SettingsError
from kvstore.identity import Tokens as Ids
from kvstore.identity import as_tokens, salt_digest
from kvstore.listing import NamespaceUse
from kvstore.match import Match, Namespace
from kvstore.records import NameRecord
from kvstore.store import Store
from kvstore.tools.prompts import Tokens, read_prompt
from kvstore.tools.standing import ID_DIGITS, find_namespace, find_prefix
from kvstore.tools.standins import Spell, whole


@dataclass(frozen=True, slots=True)
class Named:
    """A named prefix. match: what is stored of it now; None where its namespace is gone.

    pinned: whether its blocks are kept from eviction now.
    """

    name: str
    record: NameRecord
    label: str
    match: Match | None
    pinned: bool

    @property
    def tokens(self) -> int:
        """Tokens it was given."""
        return len(self.record.tokens) // 4

    @property
    def stored(self) -> int:
        """How many of them are still there."""
        return 0 if self.match is None else self.match.tokens

    def to_dict(self, spell: Spell = whole) -> dict[str, Any]:
        """Plain values."""
        record = self.record
        return {
            "name": self.name,
            "namespace": spell(record.root),
            "label": self.label,
            "tokens": self.tokens,
            "stored": self.stored,
            "by_tier": {} if self.match is None else self.match.by_tier,
            "pinned": self.pinned,
            "priority": record.priority,
            "created": record.created,
            "expires": record.expires or None,
            "pinned_bytes": len(record.keys) * record.slot_bytes if self.pinned else 0,
        }


def namespaces_for(store: Store, namespace: str | None, salt: str | None) -> list[NamespaceUse]:
    """Namespaces that fit a label or root and a salt, where these are given. Raises NotFoundError, AmbiguousError."""
    chosen = [find_namespace(store, namespace)] if namespace is not None else store.namespaces()
    if salt is not None:
        under = [use for use in chosen if use.record.salt == salt_digest(salt)]
        if chosen and not under:
            raise NotFoundError(*no_salt(salt, namespace))
        chosen = under
    if not chosen:
        raise NotFoundError("the store has no namespaces yet", "nothing was saved here, or everything was forgotten")
    return chosen


def no_salt(salt: str, namespace: str | None = None) -> tuple[str, str]:
    """Problem and remedy where no namespace, or not the one that was named too, is under a salt."""
    what = "nothing is stored" if namespace is None else f"the namespace {namespace!r} is not"
    return (
        f"{what} under the salt {salt!r}",
        "check the salt; kvstore ls lists namespaces with digests of their salts",
    )


def find_tokens(
    store: Store, argument: str, uses: Sequence[NamespaceUse], tokens: Tokens | None, as_text: bool, settled: bool
) -> tuple[Namespace, Ids]:
    """The namespace and the tokens that an argument means.

    settled: of a chat only what stays whatever is said next. Raises NotFoundError where nothing of it is stored,
    AmbiguousError where several namespaces have as much of it, SettingsError for text without a tokenizer.
    """
    ids = ids_of_argument(argument, tokens, as_text, settled)
    return by_name(store, argument, uses) if ids is None else by_ids(store, ids, uses)


def ids_of_argument(argument: str, tokens: Tokens | None, as_text: bool, settled: bool) -> Sequence[int] | None:
    """The token ids that an argument means; None for what may be a name or a key. Raises SettingsError, PathError."""
    prompt = read_prompt(argument, as_text)
    if prompt is None:
        return None
    if tokens is None and prompt.ids is None:
        raise SettingsError(f"{prompt.source} is text, and the store knows tokens", "pass --tokenizer, or token ids")
    return (tokens.ids(prompt, settled) if tokens is not None else prompt.ids) or ()


def by_ids(store: Store, listed: Sequence[int], uses: Sequence[NamespaceUse]) -> tuple[Namespace, Ids]:
    """The namespace that has most of these tokens, and the tokens. Raises NotFoundError, AmbiguousError, TokenError."""
    ids = as_tokens(listed)
    matches = [(store.match(space_of(use), ids).tokens, use) for use in uses]
    most = max(count for count, _ in matches)
    if not most:
        raise NotFoundError("nothing of this prompt is stored", "kvstore explain says why")
    best = [use for count, use in matches if count == most]
    if len(best) > 1:
        roots = ", ".join(use.record.root.hex()[:ID_DIGITS] for use in best)
        raise AmbiguousError(f"{len(best)} namespaces have {most} tokens of it", f"pass --namespace: {roots}")
    return space_of(best[0]), ids


def space_of(use: NamespaceUse) -> Namespace:
    """A listed namespace, to match in."""
    return Namespace(use.layout, use.record.root, use.record)


def named(store: Store) -> list[Named]:
    """All named prefixes, by name."""
    uses = {use.record.root: use for use in store.namespaces()}
    held, found = store.pinned(), []
    for name, record in sorted(store.names().items()):
        use = uses.get(record.root)
        match = None if use is None else store.match(space_of(use), ids_of(record))
        found.append(Named(name, record, use.record.label if use else "", match, name in held))
    return found


def find_named(store: Store, name: str) -> Named:
    """A named prefix by its name. Raises NotFoundError."""
    found = next((one for one in named(store) if one.name == name), None)
    if found is None:
        raise NotFoundError(f"no prefix is named {name!r}", "kvstore names lists the names")
    return found


def by_name(store: Store, argument: str, uses: Sequence[NamespaceUse]) -> tuple[Namespace, Ids]:
    """A named prefix, or a stored sequence by the beginning of its key; never a file.

    Raises NotFoundError, AmbiguousError.
    """
    record = store.names().get(argument)
    if record is not None:
        use = next((use for use in uses if use.record.root == record.root), None)
        if use is None:
            raise NotFoundError(f"{argument!r} names a prefix of another namespace", "leave --namespace out")
        return space_of(use), ids_of(record)
    matches: list[tuple[NamespaceUse, Match]] = []
    for use in uses:
        try:
            matches.append((use, find_prefix(store, use, argument)))
        except AmbiguousError:
            raise
        except KVStoreError:
            continue
    if not matches:
        raise NotFoundError(
            f"{argument!r} is no file, no name, and begins no key of a stored sequence",
            "pass --text for a text; kvstore names and kvstore ls list what is there",
        )
    if len(matches) > 1:
        raise AmbiguousError(f"{argument!r} begins keys in {len(matches)} namespaces", "use more digits")
    return space_of(matches[0][0]), matches[0][1].chain.tokens


def ids_of(record: NameRecord) -> Ids:
    """The tokens of a name."""
    return as_tokens(np.frombuffer(record.tokens, "<u4"))
