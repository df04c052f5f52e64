"""Sizes and numbers as people write them: ``20GiB``, ``500MB``, ``1.5 GiB``, ``4096``; ``1 block``, ``2 blocks``.

Decimal units (kB, MB, …) count by 1000, binary ones (KiB, MiB, …) by 1024. A bare ``20G`` is refused, since half of
the world's tools mean one by it and half the other. Must not know what a size is for.
"""

from __future__ import annotations

import re
from decimal import Decimal

from kvstore.errors import SettingsError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZE_LIMIT = 2**63 - 1

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtp", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgtp", start=1)},
}
_SIZE = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?)\s*([a-zA-Z]*)")
_REMEDY = "write bytes, or a number with a unit: 4096, 500MB, 20GiB, 1.5 GiB"


def parse_size(size: str | int) -> int:
    """Bytes of a size; fractions of a byte are cut off. Upper and lower case are one.

    Raises SettingsError, without saying where the size came from, for anything else.
    """
    if isinstance(size, bool) or not isinstance(size, str | int):
        raise SettingsError(f"{size!r} is not a size", _REMEDY)
    if isinstance(size, int):
        count = size
    else:
        found = _SIZE.fullmatch(size.strip())
        if found is None:
            raise SettingsError(f"{size!r} is not a size", _REMEDY)
        number, unit = found[1], found[2].lower()
        if unit not in _UNITS:
            raise SettingsError(f"{size!r} is not a size: there is no unit {found[2]!r}", _unit_remedy(number, unit))
        count = int(Decimal(number) * _UNITS[unit])
    if not 0 <= count <= SIZE_LIMIT:
        raise SettingsError(f"{size!r} is not a size: it must lie in 0…2⁶³−1 bytes", _REMEDY)
    return count


def format_size(count: int) -> str:
    """A size for people, in binary units with at most two decimals: ``1.5 GiB``. Raises ValueError below zero."""
    if count < 0:
        raise ValueError(f"a size is not negative: {count}")
    if count < KIB:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, 5)
    if power < 5 and round(count / KIB**power, 2) >= KIB:
        power += 1
    return f"{count / KIB**power:.2f}".rstrip("0").rstrip(".") + f" {'KMGTP'[power - 1]}iB"


def counted(number: int, one: str) -> str:
    """How many of something: ``1 block``, ``2,000 blocks``. one: a noun with a regular plural."""
    plural = f"{one}es" if one.endswith("s") else f"{one}s"
    return f"{number:,} {one if number == 1 else plural}"


def _unit_remedy(number: str, unit: str) -> str:
    if unit in ("k", "m", "g", "t", "p"):
        letter = unit.upper()
        return f"write {number}{letter}iB (by 1024) or {number}{letter}B (by 1000)"
    return _REMEDY
