"""The limits are measured on what they claim: every byte is copied, written and read, and nothing stays behind."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import PathError
from kvstore.tools.limits import PAGE, Memory, RawFile, memcpy, shares

SHM = Path("/dev/shm")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


@given(st.integers(0, 10_000), st.integers(1, 8), st.integers(1, 300))
def test_shares_cover_everything_once_at_unit_boundaries(total: int, parts: int, unit: int) -> None:
    spans = shares(total, parts, unit)
    assert len(spans) <= parts
    assert [at for span in spans for at in range(*span)] == list(range(total))
    assert all(start % unit == 0 for start, _ in spans)


@pytest.mark.parametrize("folder", [None, SHM])
def test_memcpy_copies_every_byte(pool: ThreadPoolExecutor, folder: Path | None) -> None:
    source, target = Memory(3 * PAGE + 5), Memory(3 * PAGE + 5, folder)
    source.bytes[:] = np.random.default_rng(0).integers(0, 256, source.bytes.size, dtype=np.uint8)
    assert memcpy([target.bytes], [source.bytes], pool, 2) > 0
    assert np.array_equal(target.bytes, source.bytes)


def test_shared_memory_leaves_no_file(tmp_path: Path) -> None:
    Memory(PAGE, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_raw_file_writes_and_reads_every_byte_and_is_deleted(
    tmp_path: Path, pool: ThreadPoolExecutor, threads: int
) -> None:
    size, block = 21 * PAGE, 4 * PAGE
    written, read = Memory(size), Memory(size)
    written.bytes[:] = np.random.default_rng(threads).integers(0, 256, size, dtype=np.uint8)
    with RawFile(tmp_path, size) as raw:
        assert raw.write(written, block, pool, threads, batch=8 * PAGE) > 0
        assert raw.read(read, block, pool, threads) > 0
        assert raw.path.read_bytes() == written.bytes.tobytes()
    assert np.array_equal(read.bytes, written.bytes)
    assert list(tmp_path.iterdir()) == []


def test_raw_file_works_where_o_direct_does_not(pool: ThreadPoolExecutor) -> None:
    memory = Memory(8 * PAGE)
    with RawFile(SHM, 8 * PAGE) as raw:
        assert raw.read(memory, PAGE, pool, 1) > 0
    assert not memory.bytes.any()


def test_a_folder_that_cannot_be_written_is_named() -> None:
    with pytest.raises(PathError, match="/proc"):
        RawFile(Path("/proc"), PAGE)


def test_too_large_a_file_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(PathError, match="cannot be written"):
        RawFile(tmp_path, 1 << 60)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_was_there_is_written_over_and_stays(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    """Its first bytes are, and no others."""
    there, memory = tmp_path / "there", Memory(4 * PAGE)
    there.write_bytes(b"x" * 6 * PAGE)
    with RawFile.over(there, 4 * PAGE) as raw:
        assert raw.write(memory, PAGE, pool, 1) > 0
    assert there.read_bytes() == memory.bytes.tobytes() + b"x" * 2 * PAGE
