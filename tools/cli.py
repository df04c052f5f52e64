"""The command ``kvstore``: which commands there are. Must not know how any of them works."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from kvstore.tools.doctor import doctor
from kvstore.tools.terminal import command

app = typer.Typer(
    name="kvstore",
    help="A tiered, persistent KV cache for LLM inference.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvstore {metadata.version('prefix-kvstore')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which.")] = False,
) -> None:
    pass


for _run in (doctor,):
    app.command()(command(_run))


def main() -> None:
    """The entry point of the console script."""
    app(prog_name="kvstore")


if __name__ == "__main__":
    main()
