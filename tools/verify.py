"""``kvstore verify``: checks a store's books and every checksum, and mends it when told to."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from kvstore.tools import answers, terminal
from kvstore.tools.standing import standing_store

SHOWN = 50


def verify(
    repair: Annotated[bool, typer.Option("--repair", help="Remove what is wrong.")] = False,
    books_only: Annotated[bool, typer.Option("--books-only", help="Leave out the payloads' checksums.")] = False,
    path: terminal.PathOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """Check index, slots and counters of every tier, and every block's checksum. Exit code 1 when something is wrong.

    Other processes may go on using the store.

    Example:

        kvstore verify --path ./store
    """
    with standing_store(path) as store, terminal.progress() as step:
        report = store.verify(
            payloads=not books_only, repair=repair, progress=lambda done, total: step("verify", done, total)
        )
    if as_json:
        terminal.print_json(answers.verified(report))
    else:
        out = terminal.console()
        for problem in report.problems[:SHOWN]:
            out.print(escape(problem))
        if len(report.problems) > SHOWN:
            out.print(f"… and {len(report.problems) - SHOWN} more")
        checked = "books" if books_only else f"books and {report.checked:,} blocks"
        out.print(f"Checked {checked}: " + ("all is well" if report.ok else f"{len(report.problems)} problems"))
        if report.repaired:
            out.print(f"Repaired: {report.repaired:,} blocks were removed")
    if not report.ok:
        raise typer.Exit(1)
