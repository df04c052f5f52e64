"""One client's connection to `kvstore serve`, as far as uvicorn leaves it unbounded: how many there may be, how long a
client may take to send the head of a request, and how long it may leave an answer unread.

Must not know what is asked for.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS = 128
"""At once; further ones are closed unheard."""
HEAD_S = 10.0
UNREAD_S = 10.0
HEAD_BYTES = 16 << 10


class Connection(H11Protocol):
    """A connection that ends when its client does not go on."""

    _head: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Refused past `CONNECTIONS`."""
        super().connection_made(transport)
        line = transport.get_extra_info("socket")
        if line is not None and line.family != socket.AF_UNIX:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else a kept connection waits 40 ms an answer
        if len(self.connections) > CONNECTIONS:
            transport.abort()
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._head = _off(self._head)
        self._unread = _off(self._unread)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """The first bytes of a head begin its time."""
        if self._head is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()
        super().data_received(data)

    def handle_events(self) -> None:
        """What came may have been the head of a request."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._head = _off(self._head)

    def on_response_complete(self) -> None:
        """What was written must be fetched."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size() and self._unread is None:
            self._unread = self.loop.call_later(UNREAD_S, self.transport.abort)

    def pause_writing(self) -> None:
        """The client does not read: give it a while."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        """It reads."""
        super().resume_writing()
        self._unread = _off(self._unread)

    def _await_head(self) -> None:
        _off(self._head)
        self._head = self.loop.call_later(HEAD_S, self.transport.abort)


def _off(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancel a timer; what is to be kept of it: nothing."""
    if timer is not None:
        timer.cancel()
    return None
