"""Lanes: the queues in which a device does its work, and the marks that order one after another.

On CUDA a lane is a stream and a mark an event; on the CPU work is done at once and every mark has passed. Whoever
writes device code hands it to a lane and orders lanes by marks, so that the same code runs on both. Must not know
blocks, slots or buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias

import torch

from kvstore.errors import UnsupportedError

_cuda: Any = torch.cuda  # its stubs are not complete

Lane: TypeAlias = Any
"""A ``torch.cuda.Stream``; None where there are none."""


class Mark(Protocol):
    """A point in a lane's work. All methods may be called from any thread."""

    def done(self) -> bool:
        """Whether everything before the mark has happened. Never blocks."""

    def wait(self) -> None:
        """Return when it has; does not hold the GIL meanwhile."""


class Lanes(Protocol):
    """The lanes of one device. All methods may be called from any thread; work of one lane happens in order."""

    needs_pinned: bool
    """Whether host memory must be page-locked for a copy to run by itself."""

    @property
    def inbound(self) -> Lane:
        """The side lane of copies from the host."""

    @property
    def outbound(self) -> Lane:
        """The side lane of copies to the host."""

    def current(self) -> Lane:
        """The lane on which the calling thread's own work goes."""

    def submit(self, lane: Lane, work: Callable[[], object]) -> None:
        """Have ``work`` queue its device operations on ``lane``. Memory that it uses must outlive them."""

    def mark(self, lane: Lane) -> Mark:
        """A mark behind all that ``lane`` was given so far."""

    def follow(self, lane: Lane, mark: Mark) -> None:
        """What ``lane`` is given from now on happens after ``mark``. Never blocks the host."""

    def settle(self) -> None:
        """Return when the device has done everything it was given, by anybody."""


class Passed:
    """The mark of work that is done."""

    def done(self) -> bool:
        """True."""
        return True

    def wait(self) -> None:
        """Return at once."""


PASSED = Passed()


class Unsealed:
    """The mark of work that is still being queued, or whose queueing failed so that nobody can know when it ends."""

    def done(self) -> bool:
        """False."""
        return False

    def wait(self) -> None:
        """Raise RuntimeError: there is nothing to wait for."""
        raise RuntimeError("the device failed while copies were queued")


UNSEALED = Unsealed()


class HostLanes:
    """The CPU: work is done when it is submitted, on the calling thread."""

    needs_pinned = False

    @property
    def inbound(self) -> Lane:
        """None: there is one lane."""
        return None

    @property
    def outbound(self) -> Lane:
        """None: there is one lane."""
        return None

    def current(self) -> Lane:
        """None: there is one lane."""
        return None

    def submit(self, lane: Lane, work: Callable[[], object]) -> None:
        """Do the work."""
        with torch.inference_mode():
            work()

    def mark(self, lane: Lane) -> Mark:
        """A mark that has passed."""
        return PASSED

    def follow(self, lane: Lane, mark: Mark) -> None:
        """Nothing to order."""

    def settle(self) -> None:
        """Nothing is in flight."""


class CudaLanes:
    """Streams and events of one CUDA device: one side stream for each direction of copies."""

    needs_pinned = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._inbound = _cuda.Stream(device)
        self._outbound = _cuda.Stream(device)

    @property
    def inbound(self) -> Lane:
        """The side stream of copies from the host."""
        return self._inbound

    @property
    def outbound(self) -> Lane:
        """The side stream of copies to the host."""
        return self._outbound

    def current(self) -> Lane:
        """The calling thread's current stream of this device."""
        return torch.cuda.current_stream(self._device)

    def submit(self, lane: Lane, work: Callable[[], object]) -> None:
        """Run ``work`` with ``lane`` as the current stream.

        Under inference mode, or buffers that an engine made under it could not be written.
        """
        with torch.inference_mode(), torch.cuda.stream(lane):
            work()

    def mark(self, lane: Lane) -> Mark:
        """An event recorded on the stream."""
        event = _cuda.Event(blocking=True)
        event.record(lane)
        return _EventMark(event)

    def follow(self, lane: Lane, mark: Mark) -> None:
        """Make the stream wait for the event, on the device."""
        if isinstance(mark, _EventMark):
            lane.wait_event(mark.event)

    def settle(self) -> None:
        """Synchronize the device."""
        torch.cuda.synchronize(self._device)


class _EventMark:
    """A recorded event; ``blocking=True`` lets a waiting thread sleep instead of spinning."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


def single_device(devices: Iterable[torch.device | str]) -> torch.device:
    """The one device that all of ``devices`` are, with its index.

    Raises UnsupportedError for several devices, and for one that is neither a CPU nor a CUDA device.
    """
    found = {_indexed(_parsed(device)) for device in devices}
    if len(found) != 1:
        raise UnsupportedError(
            f"the KV is spread over {len(found)} devices: {', '.join(sorted(map(str, found))) or 'none'}",
            "hbm serves models on one device; leave hbm at 0 for this one",
        )
    (device,) = found
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(
            f"hbm does not know devices such as {device}", "use cuda, cuda:0 or cpu, or leave hbm at 0"
        )
    return device


def _parsed(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise UnsupportedError(
            f"torch knows no device {device!r}", "use cuda, cuda:0 or cpu, or leave hbm at 0"
        ) from error


def _indexed(device: torch.device) -> torch.device:
    if str(device) == "cuda":
        if not torch.cuda.is_available():
            raise UnsupportedError("there is no CUDA device", "leave hbm at 0, or use device='cpu' to try it out")
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device.type) if device.type == "cpu" else device


def lanes_of(device: torch.device) -> Lanes:
    """The lanes of a device that `single_device` let through."""
    if device.type == "cpu":
        return HostLanes()
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        raise UnsupportedError(f"there is no device {device}", "leave hbm at 0, or name a device that nvidia-smi shows")
    return CudaLanes(device)
