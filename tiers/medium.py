"""Where a tier's bytes lie: segment files on tmpfs, mapped, or on a disk, read and written past the page cache.

A medium knows segments by number, offsets and lengths; it does not know slots, blocks or indexes. `FaultMedium` and
`ThrottleMedium` wrap one. All methods may be called from any thread.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from kvstore.errors import NoSpaceError, StorageError
from kvstore.kv import Bytes
from kvstore.tiers.mapping import HugePages, map_file, populate

ALIGNMENT = 4096
_FILL_BYTES = 8 << 20
_POPULATE_STEP = 8 << 20


class Medium(Protocol):
    """Segments as byte ranges. Offsets, lengths and buffers are multiples of 4096."""

    name: str

    def allocate(self, segment: int, size: int) -> None:
        """Make a segment's file with all its blocks. Raises NoSpaceError and leaves nothing behind."""

    def prepare(self, segment: int, size: int) -> None:
        """Make its first use as fast as any later one: populate a mapping, write zeros over unwritten extents."""

    def join(self, segment: int) -> None:
        """A disk will read into it: have its memory in large pages, in the background, where the medium is memory."""

    def remove(self, segment: int) -> None:
        """Delete a segment's file, if it is there."""

    def length(self, segment: int) -> int | None:
        """Bytes the segment has now: -1 when it is missing, None where there is no limit."""

    def window(self, segment: int, size: int) -> Bytes | None:
        """The segment's memory, where the medium is memory; else None. Raises DamagedError for a short file."""

    def read(self, segment: int, offset: int, into: Sequence[Bytes]) -> None:
        """Fill buffers from consecutive bytes. Raises StorageError."""

    def write(self, segment: int, offset: int, data: Sequence[Bytes]) -> None:
        """Write buffers to consecutive bytes. Raises StorageError or NoSpaceError."""

    def sync(self, segments: Iterable[int]) -> None:
        """Return when what was written to these segments is on the medium. Raises StorageError."""

    def close(self) -> None:
        """Let go of files; mappings live as long as somebody uses them."""


def segment_path(directory: Path, segment: int) -> Path:
    """The file of a segment."""
    return directory / f"{segment:08x}.seg"


def file_length(path: Path) -> int:
    """Bytes of a file; -1 when it is missing."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable. Raises StorageError."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise StorageError(f"syncing {directory}: {error.strerror}", "check the disk") from error


def segment_number(file: Path) -> int | None:
    """The segment that a file belongs to, from its name; None for any other file."""
    if file.suffix not in (".seg", ".slots") or len(file.stem) != 8:
        return None
    try:
        return int(file.stem, 16)
    except ValueError:
        return None


def aligned_buffer(size: int) -> Bytes:
    """Page-aligned, zeroed memory of ``size`` bytes, in huge pages where the kernel gives them. Raises StorageError."""
    try:
        memory = mmap.mmap(-1, max(size, ALIGNMENT))
    except OSError as error:
        raise StorageError(f"no memory for {size} bytes: {error.strerror}", "free some memory") from error
    memory.madvise(mmap.MADV_HUGEPAGE) if hasattr(mmap, "MADV_HUGEPAGE") and size >= 2 << 20 else None
    return np.frombuffer(memory, np.uint8)[:size]


class MappedMedium:
    """Segments on tmpfs, mapped into the process and shared with every other.

    mapped, unmapped: told of mappings. join_first: only when their pages have been joined, by another thread; for
    those that keep them where they are. Else pages are joined once it is seen to pay (`RamTier.expect_use` and
    `expect_reads`): it costs as much as filling them, more where a virtual machine must first be given the memory.
    """

    def __init__(
        self,
        directory: Path,
        name: str = "ram",
        *,
        mapped: Callable[[Bytes], None] = lambda window: None,
        unmapped: Callable[[Bytes], None] = lambda window: None,
        join_first: bool = False,
    ) -> None:
        self.directory = directory
        self.name = name
        self._mapped, self._unmapped = mapped, unmapped
        self._join_first = join_first
        self._pages = HugePages(mapped if join_first else lambda window: None)
        self._joined: set[int] = set()
        self._lock = threading.Lock()
        self._windows: dict[int, Bytes] = {}

    def allocate(self, segment: int, size: int) -> None:
        """Make a segment's file with all its pages, or nothing. Raises NoSpaceError."""
        allocate_file(segment_path(self.directory, segment), size, self.name)

    def prepare(self, segment: int, size: int) -> None:
        """Enter the segment's pages into this process's page table."""
        window = self.window(segment, size)
        for start in range(0, size, _POPULATE_STEP):
            populate(window[start : start + _POPULATE_STEP])

    def join(self, segment: int) -> None:
        """Have the segment's pages joined, in the background, once. Never waits."""
        with self._lock:
            window = self._windows.get(segment)
            if window is None or self._join_first or segment in self._joined:
                return
            self._joined.add(segment)
        self._pages.add(window)

    def remove(self, segment: int) -> None:
        """Delete a segment's file; memory is freed when no process maps it any more."""
        with self._lock:
            window = self._windows.pop(segment, None)
            self._joined.discard(segment)
        if window is not None:
            self._pages.withdraw(window)
            self._unmapped(window)
        segment_path(self.directory, segment).unlink(missing_ok=True)

    def length(self, segment: int) -> int:
        """Bytes of the segment's file; -1 when it is missing."""
        return file_length(segment_path(self.directory, segment))

    def window(self, segment: int, size: int) -> Bytes:
        """The segment's memory. Raises DamagedError when the file is missing or shorter than ``size``."""
        window = self._windows.get(segment)
        if window is not None:
            return window
        with self._lock:
            window = self._windows.get(segment)
            if window is None:
                window = map_file(segment_path(self.directory, segment), size)
                self._windows[segment] = window
                self._pages.add(window) if self._join_first else self._mapped(window)
            return window

    def read(self, segment: int, offset: int, into: Sequence[Bytes]) -> None:
        """Copy out of the segment's memory."""
        window = self._window_to(segment, offset + sum(len(part) for part in into))
        for part in into:
            np.copyto(part, window[offset : offset + len(part)])
            offset += len(part)

    def write(self, segment: int, offset: int, data: Sequence[Bytes]) -> None:
        """Copy into the segment's memory."""
        window = self._window_to(segment, offset + sum(len(part) for part in data))
        for part in data:
            np.copyto(window[offset : offset + len(part)], part)
            offset += len(part)

    def sync(self, segments: Iterable[int]) -> None:
        """Memory has nowhere to be flushed to."""

    def close(self) -> None:
        """Forget the windows."""
        self._pages.close()
        with self._lock:
            self._windows.clear()

    def _window_to(self, segment: int, stop: int) -> Bytes:
        window = self.window(segment, stop)
        if len(window) < stop:
            raise StorageError(f"segment {segment} ends before byte {stop}", "run `kvstore verify`")
        return window


class DirectMedium:
    """Segments on a disk. ``direct``: past the page cache (O_DIRECT); else buffered, for filesystems without it."""

    def __init__(self, directory: Path, name: str = "nvme", *, direct: bool = True) -> None:
        self.directory = directory
        self.name = name
        self.direct = direct
        self._lock = threading.Lock()
        self._files: dict[int, int] = {}

    def allocate(self, segment: int, size: int) -> None:
        """Make a segment's file with all its blocks, or nothing. Raises NoSpaceError."""
        allocate_file(segment_path(self.directory, segment), size, self.name)

    def prepare(self, segment: int, size: int) -> None:
        """Write zeros, since the first write to a merely allocated extent is slower; make the file's name durable."""
        zeros = aligned_buffer(min(size, _FILL_BYTES))
        for start in range(0, size, len(zeros)):
            self.write(segment, start, [zeros[: size - start]])
        self.sync([segment])
        sync_directory(self.directory)

    def join(self, segment: int) -> None:
        """A disk is no memory."""

    def remove(self, segment: int) -> None:
        """Delete a segment's file."""
        with self._lock:
            fd = self._files.pop(segment, None)
            if fd is not None:
                os.close(fd)
        segment_path(self.directory, segment).unlink(missing_ok=True)

    def length(self, segment: int) -> int:
        """Bytes of the segment's file; -1 when it is missing."""
        return file_length(segment_path(self.directory, segment))

    def window(self, segment: int, size: int) -> None:
        """A disk has no memory to look into."""

    def read(self, segment: int, offset: int, into: Sequence[Bytes]) -> None:
        """Fill buffers by one `preadv` where the kernel does it in one. Raises StorageError."""
        self._transfer(os.preadv, segment, offset, into)

    def write(self, segment: int, offset: int, data: Sequence[Bytes]) -> None:
        """Write buffers by one `pwritev` where the kernel does it in one. Raises StorageError or NoSpaceError."""
        self._transfer(os.pwritev, segment, offset, data)

    def sync(self, segments: Iterable[int]) -> None:
        """fdatasync every segment named."""
        for segment in sorted(set(segments)):
            try:
                os.fdatasync(self._file(segment))
            except OSError as error:
                raise StorageError(f"syncing segment {segment}: {error.strerror}", "check the disk") from error

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            files, self._files = self._files, {}
        for fd in files.values():
            os.close(fd)

    def _file(self, segment: int) -> int:
        fd = self._files.get(segment)
        if fd is not None:
            return fd
        with self._lock:
            fd = self._files.get(segment)
            if fd is None:
                flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0)
                try:
                    fd = os.open(segment_path(self.directory, segment), flags)
                except OSError as error:
                    raise StorageError(
                        f"opening segment {segment}: {error.strerror}", "run `kvstore verify`"
                    ) from error
                self._files[segment] = fd
            return fd

    def _transfer(self, call: object, segment: int, offset: int, buffers: Sequence[Bytes]) -> None:
        fd = self._file(segment)
        views = [buffer.data for buffer in buffers if len(buffer)]
        while views:
            try:
                done = call(fd, views[: os.sysconf("SC_IOV_MAX")], offset)  # type: ignore[operator]
            except OSError as error:
                kind = NoSpaceError if error.errno in (errno.ENOSPC, errno.EDQUOT) else StorageError
                raise kind(f"segment {segment} at byte {offset}: {error.strerror}", "check the disk") from error
            if done <= 0:
                raise StorageError(f"segment {segment} ends at byte {offset}", "run `kvstore verify`")
            offset += done
            while views and done >= len(views[0]):
                done -= len(views.pop(0))
            if done:
                views[0] = views[0][done:]


def allocate_file(path: Path, size: int, name: str) -> None:
    """Make a file with all its blocks, or none. Raises NoSpaceError or StorageError."""
    fd = -1
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
            raise StorageError(f"allocating {path}: {error.strerror}", "check the medium") from error
        raise NoSpaceError(
            f"no room for a segment of {size} bytes in {name}", "free some space, or lower the budget"
        ) from error
    finally:
        if fd >= 0:
            os.close(fd)
