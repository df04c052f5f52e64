"""The command ``kvstore``: which commands there are. Must not know how any of them works."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from kvstore.tools import bench
from kvstore.tools.carry import export, import_
from kvstore.tools.demo import demo
from kvstore.tools.doctor import doctor
from kvstore.tools.evict import evict
from kvstore.tools.explain import explain
from kvstore.tools.names import names, pin, show, unpin
from kvstore.tools.plan import plan
from kvstore.tools.savings import savings
from kvstore.tools.serve import serve
from kvstore.tools.show import ls, stats
from kvstore.tools.tenants import namespace, quota
from kvstore.tools.terminal import command, prepare
from kvstore.tools.top import top
from kvstore.tools.verify import verify
from kvstore.tools.warm import warm

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
        try:
            typer.echo(f"kvstore {metadata.version('prefix-kvstore')}")
        except metadata.PackageNotFoundError:
            typer.echo("kvstore, run from a checkout")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which.")] = False,
) -> None:
    pass


app.command()(command(demo))
app.command()(command(stats))
app.command()(command(ls))
app.command()(command(top))
app.command()(command(savings))
app.command()(command(serve))
app.command()(command(evict))
app.command()(command(verify))
app.command()(command(doctor))
app.command()(command(warm))
app.command()(command(names))
app.command()(command(show))
app.command()(command(pin))
app.command()(command(unpin))
app.command()(command(quota))
app.command()(command(namespace))
app.command()(command(explain))
app.command()(command(plan))
app.command()(command(export))
app.command("import")(command(import_))

_bench = typer.Typer(name="bench", help="Figures, each beside its limit.", no_args_is_help=True, rich_markup_mode=None)
_bench.command()(command(bench.resume))
_bench.command()(command(bench.decode))
_bench.command()(command(bench.tiers))
_bench.command()(command(bench.index))
_bench.command()(command(bench.page))
_bench.command()(command(bench.commands))
_bench.command()(command(bench.vllm))
app.add_typer(_bench)


def main() -> None:
    """Run the command that the arguments name."""
    prepare()
    app(prog_name="kvstore")


if __name__ == "__main__":
    main()
