"""``kvstore savings``: what a store was worth, by namespace and day, beside its own cost.

How tokens become seconds and money is `worth`'s. Must not change anything.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.markup import escape

from kvstore.days import DAY_S, OTHERS, Day, Days
from kvstore.listing import NamespaceUse
from kvstore.sizes import format_size
from kvstore.statistics import Stats
from kvstore.store import Store
from kvstore.tools import remote, terminal
from kvstore.tools.standing import ID_DIGITS, find_namespace, standing_store
from kvstore.tools.standins import Spell, whole
from kvstore.tools.worth import Prices, Worth, measured_rate, storage, total, worth


@dataclass(frozen=True, slots=True)
class Line:
    """One namespace on one day."""

    day: int
    root: bytes
    label: str
    worth: Worth


def savings(
    days: Annotated[int, typer.Option(help="Days to look back, today included; 0 for all.", min=0)] = 30,
    namespace: Annotated[
        str | None, typer.Option(help="Only this one: a label, or the beginning of a root.", show_default=False)
    ] = None,
    price: Annotated[float, typer.Option(help="Money a million input tokens.", min=0)] = 0.0,
    cache_read: Annotated[float, typer.Option(help="Factor on the price of tokens read from the cache.", min=0)] = 0.1,
    cache_write: Annotated[float, typer.Option(help="Factor on the price of tokens written to it.", min=0)] = 1.25,
    prefill: Annotated[
        float | None,
        typer.Option(help="Tokens a second of a prefill, instead of the measured.", min=0.001, show_default=False),
    ] = None,
    ram_price: Annotated[float, typer.Option(help="Money a GB and month of memory.", min=0)] = 0.0,
    disk_price: Annotated[float, typer.Option(help="Money a GB and month of disk.", min=0)] = 0.0,
    path: terminal.PathOption = None,
    url: terminal.UrlOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """Tokens and seconds of prefill that were not repeated, by namespace and day, money, and what the store cost.

    Tokens that were loaded and then computed all the same count as computed. Seconds of prefill are estimated by the
    speed at which the same namespace's prompts ran when nothing of them was found; where none did, they are unknown.

    Example:

        kvstore savings --price 3 --path ./store
    """
    prices = Prices(price, cache_read, cache_write, ram_price, disk_price)
    server = remote.at(url)
    if server is not None:
        asked = {"price": price, "cache_read": cache_read, "cache_write": cache_write, "prefill": prefill}
        asked |= {"ram_price": ram_price, "disk_price": disk_price}
        told = server.get("/v1/savings", days=days, namespace=namespace, **asked)
    else:
        with standing_store(path) as store:
            told = answer(store, days, namespace, prices, prefill)
    if as_json:
        terminal.print_json(told)
    else:
        _show(told, prices)


def answer(
    store: Store, days: int, namespace: str | None, prices: Prices, prefill: float | None, spell: Spell = whole
) -> dict[str, Any]:
    """What the last days were worth, as plain values. Raises NotFoundError, AmbiguousError."""
    root = find_namespace(store, namespace, spell).record.root if namespace is not None else None
    lines = judged(store.days(), store.namespaces(), prices, prefill, root, _first(days))
    return _told(lines, store.stats(), prices, spell)


def judged(
    days: Days,
    uses: list[NamespaceUse],
    prices: Prices,
    prefill: float | None,
    root: bytes | None,
    first: int,
) -> list[Line]:
    """A line for each namespace and day from ``first`` on. The prefill's speed is that of all days of the namespace."""
    by_root = {use.record.root: use for use in uses}
    whole: dict[bytes, Day] = {}
    for (_, one), day in days.items():
        whole[one] = whole.get(one, Day()) + day
    lines = []
    for (number, one), day in days.items():
        if number < first or root not in (None, one):
            continue
        use = by_root.get(one)
        rate = prefill or measured_rate(whole[one])
        token_bytes = use.layout.sequence_bytes(1) if use is not None else None
        lines.append(
            Line(number, one, use.record.label if use is not None else "", worth(day, token_bytes, rate, prices))
        )
    return lines


def _first(days: int) -> int:
    return int(time.time()) // DAY_S - days + 1 if days else 0


def _label(line: Line, spell: Spell) -> str:
    return "(others)" if line.root == OTHERS else line.label or spell(line.root)[:ID_DIGITS]


def _date(day: int) -> str:
    return datetime.fromtimestamp(day * DAY_S, UTC).date().isoformat()


def _told(lines: list[Line], stats: Stats, prices: Prices, spell: Spell) -> dict[str, Any]:
    allocated = {tier.name: tier.allocated_bytes for tier in stats.tiers}
    span = max((line.day for line in lines), default=0) - min((line.day for line in lines), default=0) + 1
    kept = storage(allocated, span if lines else 0, prices)
    whole = total([line.worth for line in lines])
    return {
        "days": [
            {
                "day": _date(line.day),
                "namespace": spell(line.root),
                "label": _label(line, spell),
                **line.worth.to_dict(),
            }
            for line in lines
        ],
        "total": whole.to_dict(),
        "cost": {
            "allocated_bytes": allocated,
            "storage_money": kept,
            "load_s": whole.load_s,
            "save_s": whole.save_s,
            "nvme_write_s": whole.move_s,
            "nvme_written_bytes": whole.day.moved_bytes,
        },
        "money_left": whole.money - kept,
    }


def _show(told: Mapping[str, Any], prices: Prices) -> None:
    rows = [
        (
            one["day"],
            one["label"],
            f"{one['asked_tokens']:,}",
            f"{one['reused_tokens']:,}",
            f"{one['reused_tokens'] / one['asked_tokens']:.0%}" if one["asked_tokens"] else "",
            f"{one['recomputed_tokens']:,}",
            _seconds(one["prefill_s_not_repeated"]),
            _seconds(one["load_s"]),
            f"{one['money_saved']:,.4f}" if prices.input else "",
        )
        for one in told["days"]
    ]
    out = terminal.console()
    columns = ("day", "namespace", "asked", "reused", "", "loaded, then run", "prefill not run", "loads took", "money")
    out.print(terminal.table("Tokens and prefill that were not repeated", columns, rows, right=range(2, 9)))
    whole, cost = told["total"], told["cost"]
    saved = whole["seconds_saved"]
    if not rows:
        text = "Nothing was counted in these days."
    elif saved is None:
        text = (
            "Seconds are unknown: no prompt was measured while nothing of it was found. Pass --prefill with its speed."
        )
    elif saved >= 0:
        text = f"Requests waited {_seconds(saved)} less in all."
    else:
        text = f"Loads took {_seconds(-saved)} longer than computing would have: see kvstore bench resume."
    out.print(escape(text))
    held = ", ".join(f"{format_size(size)} of {tier}" for tier, size in cost["allocated_bytes"].items())
    written = format_size(cost["nvme_written_bytes"])
    out.print(escape(f"The store takes {held}. Beside requests: saves {_seconds(cost['save_s'])}, {written} to nvme."))
    if prices.input:
        money = f"Input tokens: {whole['money_with']:,.4f} instead of {whole['money_without']:,.4f}"
        kept = f"; storage {cost['storage_money']:,.4f}" if prices.ram or prices.disk else ""
        out.print(escape(f"{money}{kept}. Left: {told['money_left']:,.4f}."))


def _seconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds:,.1f} s"
