"""What a user writes in ``kv_connector_extra_config``: the store's settings, and the adapter's own.

Must not know vLLM.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvstore.errors import SettingsError
from kvstore.settings import Settings
from kvstore.sizes import MIB, parse_size

_OWN = ("gate", "least_tokens", "later_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """store: settings for `kvstore.open`. gate: load only what is faster to load than to run again.

    least_tokens: shorter prefixes are not worth a load. later_bytes: loads from `ram` above this don't hold up a step.
    """

    store: Mapping[str, Any]
    gate: bool = True
    least_tokens: int = 16
    later_bytes: int = 512 * MIB


def read_options(given: Mapping[str, Any]) -> Options:
    """The options, checked. Raises SettingsError."""
    known = {entry.name for entry in fields(Settings)} | set(_OWN)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"options are {', '.join(sorted(known))}"
            raise SettingsError(f"kv_connector_extra_config: {name} is not an option", hint)
    own: dict[str, Any] = {}
    if "gate" in given:
        own["gate"] = _yes_or_no(given["gate"])
    if "least_tokens" in given:
        own["least_tokens"] = _count(given["least_tokens"])
    if "later_bytes" in given:
        own["later_bytes"] = parse_size(given["later_bytes"])
    return Options(store={name: value for name, value in given.items() if name not in _OWN}, **own)


def _yes_or_no(value: object) -> bool:
    if not isinstance(value, bool):
        raise SettingsError(f"kv_connector_extra_config: gate is {value!r}", "write true or false")
    return value


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingsError(f"kv_connector_extra_config: least_tokens is {value!r}", "write a whole number, 1 or more")
    return value
