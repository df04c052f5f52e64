"""``kvstore bench``: runs a benchmark and shows each figure beside its limit. Must not know how one is measured."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.settings import Settings
from kvstore.sizes import format_size
from kvstore.tools import terminal
from kvstore.tools.ratios import PAIRS_MIN
from kvstore.tools.scratch import folder_on_disk

PAIRS = 8
FIGURES = ("figure", "median", "spread", "target", "")
FolderOption = Annotated[
    Path | None, typer.Option("--path", help="Folder for the temporary store; not on tmpfs.", show_default=False)
]
PairsOption = Annotated[int, typer.Option(help="Pairs of measurements, ours and the limit in turn.", min=PAIRS_MIN)]


def resume(
    tokens: Annotated[int, typer.Option(help="Tokens that are stored and resumed.")] = 4096,
    new_tokens: Annotated[int, typer.Option(help="Tokens that each request adds.")] = 16,
    cold_tokens: Annotated[int, typer.Option(help="Tokens of the requests that measure the cost of saving.")] = 1024,
    model: Annotated[str | None, typer.Option(help="A folder, or a name on the hub.", show_default=False)] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of the model.", min=1, show_default=False)] = None,
    pairs: PairsOption = PAIRS,
    path: FolderOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """A real model's resumed requests, decoding, and cold requests, each beside its limit. Takes eight minutes.

    Example:

        kvstore bench resume --tokens 4096 --json
    """
    from kvstore.tools.bench_resume import Plan, measure
    from kvstore.tools.model import obtain

    with terminal.progress() as step:
        chosen = model or str(obtain(step))
        used = threads or len(os.sched_getaffinity(0))
        plan = Plan(chosen, folder_on_disk(path), tokens, new_tokens, pairs, used, cold_tokens)
        figures = measure(plan, step)
    names = ("ram_over_limit", "nvme_over_limit", "decode_over_stock", "save_overhead", "save_call_share")
    rows = [_row(name, figures[f"{name}_samples"], figures[f"{name}_samples"].get("ratio")) for name in names]
    _show(figures, "A resumed request, and what the adapter costs", rows, as_json)


def decode(
    tokens: Annotated[int, typer.Option(help="Tokens of the longest text, from 128 on.", min=128)] = 8192,
    repeats: Annotated[int, typer.Option(help="Runs of each figure at most.", min=1)] = 3,
    model: Annotated[str | None, typer.Option(help="A folder, or a name on the hub.", show_default=False)] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of the model.", min=1, show_default=False)] = None,
    plot: Annotated[Path | None, typer.Option(help="An SVG file to draw the figures in.", show_default=False)] = None,
    path: FolderOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """Time to the next token with no cache, with a live cache and after a resume, by length of the text.

    Up to 8,192 tokens it takes eight minutes on two processors, most of them without a cache.

    Example:

        kvstore bench decode --tokens 512 --json
    """
    from kvstore.tools.bench_decode import KINDS, Plan, measure
    from kvstore.tools.chart import refuse_other_kinds, write_chart
    from kvstore.tools.model import obtain

    if plot is not None:
        refuse_other_kinds(plot)
    with terminal.progress() as step:
        chosen = model or str(obtain(step))
        used = threads or len(os.sched_getaffinity(0))
        figures = measure(Plan(chosen, folder_on_disk(path), tokens, repeats, used), step)
    points = figures["points"]
    if plot is not None:
        names = dict(zip(KINDS, ("no cache", "live cache", "resumed, ram", "resumed, nvme"), strict=True))
        lines = {names[kind]: [(one["tokens"], one[f"{kind}_s"]) for one in points] for kind in KINDS}
        write_chart(plot, "Time to the next token", "tokens of the text", "seconds", lines)
    if as_json:
        terminal.print_json(figures)
        return
    rows = [
        (
            f"{one['tokens']:,}",
            *(f"{one[f'{kind}_s']:.3f} s" for kind in KINDS),
            f"{one['no_cache_over_live']:.1f}",
            f"{one['no_cache_over_ram']:.1f}",
        )
        for one in points
    ]
    columns = ("tokens", "no cache", "live", "from ram", "from nvme", "no cache ÷ live", "no cache ÷ ram")
    out = terminal.console()
    out.print(terminal.table("Time to the next token", columns, rows, right=range(7)))
    stored = format_size(round(figures["kv_bytes_a_token_stored"]))
    out.print(f"KV of a token: {format_size(figures['kv_bytes_a_token'])} by the configuration, {stored} stored.")


def tiers(
    tokens: Annotated[int, typer.Option(help="Tokens that are saved and loaded at once; 46,080 bytes each.")] = 4096,
    pairs: PairsOption = PAIRS,
    stores: Annotated[int, typer.Option(help="Stores, each made anew, with so many pairs each.", min=1)] = 5,
    path: FolderOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """Saves and loads of ram and nvme beside memcpy and the raw disk. Takes a minute and a half.

    Example:

        kvstore bench tiers --json
    """
    from kvstore.tools.bench_tiers import measure

    with terminal.progress() as step:
        figures = measure(tokens, pairs, stores, folder_on_disk(path), step)
    rows = [_row(name, found, found.get("ratio")) for name, found in figures["figures"].items()]
    _show(figures, "Tiers beside their media", rows, as_json)


def index(
    small: Annotated[int, typer.Option(help="Entries of the small store.", min=1)] = 10_000,
    large: Annotated[int, typer.Option(help="Entries of the large store.", min=1)] = 1_000_000,
    pairs: PairsOption = PAIRS,
    as_json: terminal.JsonOption = False,
) -> None:
    """What match, reserve and publish, and eviction cost in a small and in a large store, without payloads.

    Filling a million entries takes two minutes and 3 GiB of tmpfs.

    Example:

        kvstore bench index --large 100000 --json
    """
    from kvstore.tools.bench_index import measure

    with terminal.progress() as step:
        figures = measure((small, large), pairs, Settings.resolve(Path.cwd()).ram_directory, step)
    rows = [
        _row(name, figures[name]["samples"], figures[name]["samples"]["ratio"])
        for name in ("match", "reserve_publish", "victims")
    ]
    _show(figures, f"{large:,} entries beside {small:,}", rows, as_json)


def page(
    tokens: Annotated[int, typer.Option(help="Tokens that are stored and resumed.")] = 4096,
    new_tokens: Annotated[int, typer.Option(help="Tokens that each request adds.")] = 16,
    seconds: Annotated[float, typer.Option(help="What a round of requests takes at least.", min=0.1)] = 6.0,
    browser: Annotated[
        bool, typer.Option("--browser", help="A headless Chromium opens the page: its work counts too.")
    ] = False,
    model: Annotated[str | None, typer.Option(help="A folder, or a name on the hub.", show_default=False)] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of the model.", min=1, show_default=False)] = None,
    pairs: PairsOption = PAIRS,
    path: FolderOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """Resumed requests while kvstore serve runs and a page of it is open, beside the same without. Takes four minutes.

    The page is a program that asks what the page asks, as often; with --browser, a real one. Needs the extra serve.

    Example:

        kvstore bench page --tokens 4096 --json
    """
    from kvstore.tools.bench_page import Plan, measure
    from kvstore.tools.model import obtain

    with terminal.progress() as step:
        chosen = model or str(obtain(step))
        used = threads or len(os.sched_getaffinity(0))
        figures = measure(Plan(chosen, folder_on_disk(path), tokens, new_tokens, pairs, used, seconds, browser), step)
    samples = figures["page_over_none_samples"]
    _show(figures, "A page that somebody watches", [_row("page_over_none", samples, samples["ratio"])], as_json)


def commands(
    entries: Annotated[int, typer.Option(help="Blocks of the store.", min=1)] = 1_000_000,
    repeats: Annotated[int, typer.Option(help="Runs of each command, of which the median counts.", min=1)] = 3,
    path: FolderOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """How long commands take on a store of very many blocks, when they say their first word, and how soon stats come.

    For a million blocks it takes ten minutes and 2 GiB of disk.

    Example:

        kvstore bench commands --entries 100000 --json
    """
    from kvstore.tools.bench_commands import SOON_S, measure

    with terminal.progress() as step:
        figures = measure(entries, repeats, folder_on_disk(path), step)
    if as_json:
        terminal.print_json(figures)
        return
    rows = [
        (name, f"{one['seconds']:.2f} s", f"{one['said_s']:.2f} s", "" if one["soon"] else f"after {SOON_S:g} s")
        for name, one in figures["commands"].items()
    ]
    columns = ("command", "takes", "first word", "")
    terminal.console().print(terminal.table(f"{figures['entries']:,} blocks", columns, rows, right=(1, 2)))
    asked = [_row(f"stats: {name}", found, None) for name, found in figures["stats"].items()]
    terminal.console().print(terminal.table("Stats", FIGURES, asked, right=(1, 2)))


def vllm(
    rounds: Annotated[int, typer.Option(help="Prompts whose first tokens are timed in every way.", min=PAIRS_MIN)] = 16,
    pairs: PairsOption = 16,
    model: Annotated[Path | None, typer.Option(help="A folder with a model.", show_default=False)] = None,
    path: FolderOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """First tokens of a vLLM engine from the store beside its own cache, and the cost of misses. Takes twelve minutes.

    Needs vLLM: run it from the environment that `tools/test --vllm` makes.

    Example:

        kvstore bench vllm --json
    """
    from kvstore.tools.bench_vllm import Plan, measure, require_vllm
    from kvstore.tools.model import obtain

    require_vllm()
    with terminal.progress() as step:
        figures = measure(Plan(model or obtain(step), folder_on_disk(path), rounds, pairs), step)
    rows = [_row(name, found, None) for name, found in figures["samples"].items()]
    _show(figures, f"A prompt of {figures['tokens']:,} tokens", rows, as_json)


def _row(name: str, found: dict[str, Any], ratio: dict[str, Any] | None) -> tuple[str, ...]:
    figure = ratio or found
    spread = f"{figure['low']:.3f} … {figure['high']:.3f}"
    return name, f"{figure['median']:.3f}", spread, figure.get("target", ""), figure.get("verdict", "")


def _show(figures: dict[str, Any], title: str, rows: list[tuple[str, ...]], as_json: bool) -> None:
    if as_json:
        terminal.print_json(figures)
    else:
        terminal.console().print(terminal.table(title, FIGURES, rows, right=(1, 2)))
