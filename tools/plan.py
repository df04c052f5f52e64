"""``kvstore plan``: will it fit, and will it pay? Reads a configuration and options; the arithmetic is `planning`'s."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.errors import LayoutError, NotFoundError, PathError, SettingsError
from kvstore.sizes import format_size
from kvstore.tools import remote, terminal
from kvstore.tools.planning import planned
from kvstore.tools.published import PUBLISHED

CONFIG_LIMIT = 16 << 20
INDEX_FILE = "model.safetensors.index.json"


def plan(
    model: Annotated[
        str, typer.Argument(help=f"A config.json, the folder it is in, or one of {', '.join(PUBLISHED)}.")
    ],
    context: Annotated[int | None, typer.Option(help="Tokens of a session; else the model's longest.", min=1)] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of one device, such as 80GB.")] = None,
    devices: Annotated[int, typer.Option(help="How many such devices.", min=1)] = 1,
    weights: Annotated[str | None, typer.Option(help="What all weights take; else from files or shapes.")] = None,
    hbm: Annotated[str, typer.Option(help="Budget of the hbm tier.")] = "0",
    ram: Annotated[str, typer.Option(help="Budget of the ram tier.")] = "2GiB",
    nvme: Annotated[str, typer.Option(help="Budget of the nvme tier.")] = "20GiB",
    ram_rate: Annotated[str, typer.Option(help="What a load from ram reaches in a second.")] = "10GB",
    nvme_rate: Annotated[str, typer.Option(help="What a load from nvme reaches in a second.")] = "3GB",
    flops: Annotated[float | None, typer.Option(help="Operations a second that prefill reaches on one device.")] = None,
    latency: Annotated[float, typer.Option(help="Seconds before a load's first byte.", min=0)] = 0.005,
    dtype: Annotated[str | None, typer.Option(help="Dtype of the KV, where it is not the weights'.")] = None,
    fields: Annotated[
        list[str] | None, typer.Option("--set", help="A field of the configuration, NAME=VALUE; may be repeated.")
    ] = None,
    url: terminal.UrlOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """From a model's config.json and a machine: bytes a token, sessions that fit, what tiers hold, when loading pays.

    GB is 1000³ bytes, GiB 1024³. Nothing is downloaded and no store is needed.

    Example:

        kvstore plan llama-3.1-70b --context 131072 --memory 80GB --devices 8 --weights 141GB --flops 400e12
    """
    config, folder = read_config(model)
    given_fields = dict(_field(one) for one in fields or ())
    for name in given_fields.keys() - config.keys():
        terminal.say(f"note: the configuration had no field {name}; is it spelt as the model spells it?")
    text = {**config, **given_fields}
    if weights is None and folder is not None:
        found = weights_on_disk(folder)
        weights = None if found is None else str(found)
    given: dict[str, Any] = {"memory": memory, "weights": weights, "hbm": hbm, "ram": ram, "nvme": nvme}
    given |= {"ram_rate": ram_rate, "nvme_rate": nvme_rate, "flops": flops, "latency": latency, "devices": devices}
    given |= {"context": context, "dtype": dtype}
    server = remote.at(url)
    told = planned(text, **given) if server is None else server.post("/v1/plan", {"config": text, **given})
    told = {"model": model, **told} | {"model": model}
    if as_json:
        terminal.print_json(told)
    else:
        _show(told)


def read_config(model: str) -> tuple[dict[str, Any], Path | None]:
    """A configuration, and the folder it lies in. Raises NotFoundError, PathError, LayoutError."""
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        if model.lower() in PUBLISHED:
            return dict(PUBLISHED[model.lower()]), None
        raise NotFoundError(
            f"{model} is neither a config.json, nor a folder with one, nor a model known by name",
            f"known by name: {', '.join(PUBLISHED)}",
        )
    try:
        if path.stat().st_size > CONFIG_LIMIT:
            raise LayoutError(f"{path} is too large for a configuration", "pass a model's config.json")
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PathError(f"{path} cannot be read: {error.strerror}", "check the path and its permissions") from error
    except (ValueError, RecursionError) as error:
        raise LayoutError(f"{path} is not JSON: {error}", "pass a model's config.json") from error
    if not isinstance(config, dict):
        raise LayoutError(f"{path} is not a JSON object", "pass a model's config.json")
    return config, path.parent


def weights_on_disk(folder: Path) -> int | None:
    """Bytes of a model's weights from the files beside its configuration; None where there are none."""
    try:
        total = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))["metadata"]["total_size"]
        return int(total) or None
    except (OSError, ValueError, KeyError, TypeError):
        return sum(file.stat().st_size for file in folder.glob("*.safetensors")) or None


def _field(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise SettingsError(f"--set {text!r} is not NAME=VALUE", "write for example --set num_key_value_heads=8")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _show(told: dict[str, Any]) -> None:
    out = terminal.console()
    size, context = told["session_bytes"], told["context"]
    rows = [
        ("attention", f"{told['attention']}, {told['layers']} layers, {told['dtype']}"),
        ("KV a token", f"{told['token_bytes']:,} B ({format_size(told['token_bytes'])})"),
        (f"KV of {context:,} tokens", f"{size / 1e9:.1f} GB ({format_size(size)})"),
        ("a block", f"{told['block_tokens']} tokens, {format_size(told['block_bytes'])}"),
    ]
    for name, held in told["tiers"].items():
        text = f"{held['tokens']:,} tokens, {held['sessions']:,} whole sessions"
        rows.append((f"{name} of {format_size(held['budget_bytes'])}", text))
    if told["prefill_s"] is not None:
        rows.append((f"prefill of {context:,} tokens", f"{told['prefill_s']:.2f} s"))
    for name, time in told["loads"].items():
        pays = (
            f"does not pay up to {context:,} tokens"
            if time["break_even_tokens"] is None
            else f"pays from {time['break_even_tokens']:,} tokens on"
        )
        rows.append((f"load from {name}, at {time['bytes_per_s'] / 1e9:g} GB/s", f"{time['load_s']:.2f} s; {pays}"))
    out.print(terminal.table(told["model"], ("", ""), rows))
    if told["sessions"] is not None:
        out.print(told["sessions"]["sentence"])
    for note in told["notes"]:
        terminal.say(f"note: {note}")
