"""One client's connection to `kvstore serve`, as far as uvicorn leaves it unbounded: how many there may be, how long a
client may take to send the head of a request, and how long it may leave an answer unread.

Must not know what is asked for.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import sys
import termios
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvstore.tools import problems
from kvstore.tools.sealing import HEADERS

CONNECTIONS = 128
"""At once; further ones are closed unheard."""
HEAD_S = 10.0
UNREAD_S = 10.0
UNREAD_BYTES = 8 << 10
"""Of an answer, a client fetches as much within `UNREAD_S`, or the rest of it."""
HEAD_BYTES = 16 << 10


class Connection(H11Protocol):
    """A connection that ends when its client does not go on."""

    _head: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _left = 0

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
        """The first bytes of a head begin its time; who asks anew has fetched what there was."""
        if not self.transport.get_write_buffer_size():
            self._unread = _off(self._unread)
        if self._head is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()
        super().data_received(data)

    def handle_events(self) -> None:
        """What came may have been the head of a request."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._head = _off(self._head)

    def send_400_response(self, msg: str) -> None:
        """What could not be read, told as every other problem is."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # an answer is on its way already
            self.transport.close()
            return
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        told = problems.of_unreadable(status)
        headers = [*told.raw_headers, *HEADERS.items(), (b"connection", b"close")]
        answer = (
            h11.Response(status_code=status, headers=headers),
            h11.Data(data=bytes(told.body)),
            h11.EndOfMessage(),
        )
        for event in answer:
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def on_response_complete(self) -> None:
        """What was written must be fetched."""
        super().on_response_complete()
        self._await_fetched()

    def pause_writing(self) -> None:
        """The client does not read: give it a while."""
        super().pause_writing()
        self._await_fetched()

    def resume_writing(self) -> None:
        """It reads."""
        super().resume_writing()
        self._unread = _off(self._unread)

    def _await_fetched(self) -> None:
        self._left = self._unfetched()
        if self.transport.get_write_buffer_size() and self._unread is None:
            self._unread = self.loop.call_later(UNREAD_S, self._look_whether_fetched)

    def _look_whether_fetched(self) -> None:
        """Nothing tells when the last of an answer has been fetched, so this is looked at."""
        self._unread = None
        if self.transport.get_write_buffer_size() and self._unfetched() > self._left - UNREAD_BYTES:
            self.transport.abort()
        else:
            self._await_fetched()

    def _unfetched(self) -> int:
        """Bytes that the client has not got yet, those in the kernel included, which takes them by the megabyte."""
        queued = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        return self.transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)

    def _await_head(self) -> None:
        _off(self._head)
        self._head = self.loop.call_later(HEAD_S, self.transport.abort)


def _off(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancel a timer; what is to be kept of it: nothing."""
    if timer is not None:
        timer.cancel()
    return None
