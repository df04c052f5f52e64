"""``kvstore verify``: checks a store's books and every checksum, and mends it when told to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from kvstore.sizes import counted
from kvstore.tools import answers, remote, terminal
from kvstore.tools.remote import Remote
from kvstore.tools.standing import standing_store
from kvstore.verification import Report

SHOWN = 50


def verify(
    repair: Annotated[bool, typer.Option("--repair", help="Remove what is wrong.")] = False,
    books_only: Annotated[bool, typer.Option("--books-only", help="Leave out the payloads' checksums.")] = False,
    path: terminal.PathOption = None,
    url: terminal.UrlOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """Check index, slots and counters of every tier, and every block's checksum. Exit code 1 when something is wrong.

    Other processes may go on using the store.

    Example:

        kvstore verify --path ./store
    """
    told = _verified(remote.at(url), path, repair, books_only)
    report = Report(told["problems"], told["checked"], told["repaired"])
    if as_json:
        terminal.print_json(told)
    else:
        out = terminal.console()
        for problem in report.problems[:SHOWN]:
            out.print(escape(problem))
        if len(report.problems) > SHOWN:
            out.print(f"… and {len(report.problems) - SHOWN} more")
        checked = "books" if books_only else f"books and {counted(report.checked, 'block')}"
        out.print(f"Checked {checked}: " + ("all is well" if report.ok else counted(len(report.problems), "problem")))
        if report.repaired:
            out.print(f"Repaired, by removal: {counted(report.repaired, 'block')}")
    if not report.ok:
        raise typer.Exit(1)


def _verified(server: Remote | None, path: Path | None, repair: bool, books_only: bool) -> dict[str, Any]:
    """What was found, here or by a server."""
    with terminal.progress() as step:

        def progress(done: int, total: int) -> None:
            step("verify", done, total or None)

        if server is not None:
            return server.finished("/v1/verify", {"repair": repair, "books_only": books_only}, progress)
        lost: list[str] = []
        with standing_store(path, lost) as store:
            step("check the books", 0, None)
            report = store.verify(payloads=not books_only, repair=repair, progress=progress)
            report.problems[:0] = lost  # opening has mended these already, by removal
            return answers.verified(report)
