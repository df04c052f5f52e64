"""What routes depend on: the service behind them, and whether a request came with the token.

Must not know any route.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer

from kvstore.tools.guard import no_token
from kvstore.tools.problems import Refused
from kvstore.tools.service import Service
from kvstore.tools.standins import Spell, whole

_bearer = HTTPBearer(auto_error=False, description="The token that the server was started with.")


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _trusted(request: Request) -> bool:
    return bool(request.state.trusted)


def _spell(request: Request) -> Spell:
    return whole if request.state.trusted else _service(request).stand_ins


def _needs_token(request: Request) -> None:
    if request.app.state.service.read_only:
        raise Refused(
            403,
            "read-only",
            "this server has no token, so it changes nothing and tells no token ids",
            "whoever runs the server can start it with a token",
        )
    if not request.state.trusted:
        raise no_token()


Behind: TypeAlias = Annotated[Service, Depends(_service)]
Trusted: TypeAlias = Annotated[bool, Depends(_trusted)]
Told: TypeAlias = Annotated[Spell, Depends(_spell)]
"""How to tell keys, roots and digests of salts to who asks: whole to who has the token, to others by stand-ins."""
WITH_TOKEN = [Depends(_needs_token), Security(_bearer)]
"""Dependencies of routes that change something, or tell what token ids a prompt has: these are as good as its text."""
