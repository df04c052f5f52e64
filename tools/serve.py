"""``kvstore serve``: the admin API, the page and the metrics of a store. What they are is `api`'s."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.errors import MissingExtraError, PathError
from kvstore.tools import terminal
from kvstore.tools.standing import standing_store
from kvstore.tools.token_file import read_token

PORT = 8717
SHUTDOWN_S = 5


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on; one that others reach needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 for any that is free.", min=0, max=65535)] = PORT,
    token_file: Annotated[
        Path | None,
        typer.Option(help="A file with the token, mode 0600; else KVSTORE_TOKEN; else read-only.", show_default=False),
    ] = None,
    every: Annotated[float, typer.Option(help="Seconds between two looks at the store.", min=0.1, max=60)] = 1.0,
    seconds: Annotated[float, typer.Option(help="End after so many seconds; 0 until Ctrl-C.", min=0)] = 0,
    path: terminal.PathOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """Serve a live page, an API and Prometheus metrics of a store, beside the engines that use it.

    Without a token it changes nothing and tells no token ids. Needs the extra: pip install "prefix-kvstore[serve]", or
    ".[serve]" in a checkout.
    With --json, one object once it listens.

    Example:

        kvstore serve --port 0 --seconds 1 --path ./store
    """
    try:
        import uvicorn

        from kvstore.tools.api import application
        from kvstore.tools.connections import HEAD_BYTES, Connection
        from kvstore.tools.guard import rules_for
    except ImportError as error:
        raise MissingExtraError(
            f"kvstore serve needs {error.name}",
            'pip install "prefix-kvstore[serve]", or in a checkout: pip install ".[serve]"',
        ) from error
    rules = rules_for(host, read_token(token_file))
    with standing_store(path) as store, _listening(host, port) as listener:
        config = uvicorn.Config(
            application(store, rules, every=every),
            http=Connection,
            ws="none",
            lifespan="on",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=20,
            timeout_graceful_shutdown=SHUTDOWN_S,
            h11_max_incomplete_event_size=HEAD_BYTES,
        )
        _say(store.settings.path, listener, rules.token is None, as_json)
        _run(uvicorn.Server(config), listener, seconds)


def _listening(host: str, port: int) -> socket.socket:
    """A socket to listen on. Raises PathError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), port))
        listener.listen()  # who reads the address may connect at once
    except OSError as error:
        listener.close()
        raise PathError(
            f"cannot listen on {host}:{port}: {error.strerror}", "choose another --port or --host"
        ) from error
    return listener


def _say(path: Path, listener: socket.socket, read_only: bool, as_json: bool) -> None:
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
    if as_json:
        terminal.print_json({"url": url, "path": str(path), "read_only": read_only})
        return
    terminal.console().print(url)
    terminal.say("Read-only: pass --token-file to pin and evict." if read_only else "Changes need the token.")


def _run(server: Any, listener: socket.socket, seconds: float) -> None:
    """Serve until a signal, or for some seconds."""
    import asyncio

    async def run() -> None:
        if seconds:
            asyncio.get_running_loop().call_later(seconds, setattr, server, "should_exit", True)
        await server.serve(sockets=[listener])

    asyncio.run(run())
