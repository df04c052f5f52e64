"""The token of `kvstore serve`: a file that nobody else may read, else KVSTORE_TOKEN. Must not know who checks it."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from kvstore.errors import PathError, SettingsError

VARIABLE = "KVSTORE_TOKEN"
SHORTEST = 16
FILE_LIMIT = 4096


def token_of_environment(environ: Mapping[str, str] | None = None) -> str | None:
    """The token of KVSTORE_TOKEN, None where it is not set. Raises SettingsError for one that cannot be a token."""
    found = (os.environ if environ is None else environ).get(VARIABLE) or None
    return None if found is None else _usable(found, VARIABLE)


def read_token(file: Path | None, environ: Mapping[str, str] | None = None) -> str | None:
    """The token: of a file that nobody else may read, else of KVSTORE_TOKEN, else None.

    Raises PathError, SettingsError.
    """
    if file is None:
        return token_of_environment(environ)
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            raw = opened.read(FILE_LIMIT)
    except OSError as error:
        remedy = f"make it: (umask 077; head -c 32 /dev/urandom | base64 > {file})"
        raise PathError(f"{file} cannot be read: {error.strerror}", remedy) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise PathError(f"{file} can be read by others", f"chmod 600 {file}, and put another token in it")
    return _usable(raw.decode(errors="replace").strip(), str(file))


def _usable(token: str, source: str) -> str:
    if len(token) < SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
        raise SettingsError(
            f"the token of {source} is no token: {len(token)} characters",
            f"use {SHORTEST} or more printable characters without spaces, such as head -c 32 /dev/urandom | base64",
        )
    return token
