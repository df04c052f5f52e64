"""Keys are what their definition says, and nothing that differs shares one."""

from __future__ import annotations

import hashlib
import struct
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import TokenError
from kvstore.identity import (
    ANCESTOR_BLOCKS,
    TOKEN_LIMIT,
    Extra,
    as_tokens,
    block_key,
    chain,
    root_key,
    salt_digest,
)

IDS = st.lists(st.integers(0, TOKEN_LIMIT - 1), max_size=80)
FEW = st.lists(st.integers(0, 2), max_size=40)
FINGERPRINT = bytes(range(32))
ROOT = root_key(FINGERPRINT, "")


def reference(root: bytes, ids: list[int], block_tokens: int, extras: dict[int, bytes]) -> list[bytes]:
    """The definition, token by token."""
    keys, parent = [], root
    for index, start in enumerate(range(0, len(ids), block_tokens)):
        message = parent
        for token in ids[start : start + block_tokens]:
            message += struct.pack("<I", token)
        if index in extras:
            message += b"x" + hashlib.sha256(extras[index]).digest()
        parent = hashlib.sha256(message).digest()
        keys.append(parent)
    return keys


@given(IDS, st.integers(1, 20), st.dictionaries(st.integers(0, 6), st.binary(max_size=6), max_size=3))
def test_keys_are_the_hash_of_parent_tokens_and_extra(ids: list[int], step: int, extras: dict[int, bytes]) -> None:
    made = chain(ROOT, as_tokens(ids), step, [Extra(index, content) for index, content in extras.items()])
    assert list(made.keys) == reference(ROOT, ids, step, extras)
    for index in range(len(made)):
        assert made.keys[index] == block_key(made.parent(index), made.block(index).tobytes(), made.extra(index))


@given(IDS, st.integers(1, 20))
def test_blocks_tile_the_tokens(ids: list[int], step: int) -> None:
    made = chain(ROOT, as_tokens(ids), step)
    assert [token for index in range(len(made)) for token in made.block(index).tolist()] == ids
    spans = [made.span(index) for index in range(len(made))]
    assert all(before[1] == after[0] for before, after in pairwise(spans))
    assert made.whole == sum(stop - start == step for start, stop in spans)


@given(FEW, FEW, st.integers(1, 6))
def test_two_sequences_share_keys_exactly_as_far_as_they_share_blocks(
    left: list[int], right: list[int], step: int
) -> None:
    a, b = chain(ROOT, as_tokens(left), step), chain(ROOT, as_tokens(right), step)
    for index in range(min(len(a), len(b))):
        start, stop = index * step, (index + 1) * step
        assert (a.keys[index] == b.keys[index]) == (left[:stop] == right[:stop]), (start, stop)
    assert len(set(a.keys) | set(b.keys)) == len(
        {tuple(ids[: (i + 1) * step]) for ids, c in ((left, a), (right, b)) for i in range(len(c))}
    )


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.integers(1, 6),
    st.binary(max_size=4),
    st.binary(max_size=4),
)
def test_two_salts_share_no_key(ids: list[int], step: int, left: bytes, right: bytes) -> None:
    a = chain(root_key(FINGERPRINT, left), as_tokens(ids), step)
    b = chain(root_key(FINGERPRINT, right), as_tokens(ids), step)
    assert set(a.keys).isdisjoint(b.keys) == (left != right)


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.integers(1, 6),
    st.binary(max_size=40),
    st.binary(max_size=40),
)
def test_extras_separate_their_block_and_all_that_follow(ids: list[int], step: int, left: bytes, right: bytes) -> None:
    at = (len(ids) - 1) // step // 2
    plain = chain(ROOT, as_tokens(ids), step)
    a = chain(ROOT, as_tokens(ids), step, [Extra(at, left)])
    b = chain(ROOT, as_tokens(ids), step, [Extra(at, right)])
    assert plain.keys[:at] == a.keys[:at] == b.keys[:at]
    assert set(plain.keys[at:]).isdisjoint(a.keys[at:])
    assert set(a.keys[at:]).isdisjoint(b.keys[at:]) == (left != right)


@given(st.binary(max_size=200))
def test_an_extra_cannot_pass_for_tokens(content: bytes) -> None:
    assert len(Extra(0, content).encoded()) % 4 != 0


def test_an_extra_past_the_end_changes_nothing_yet() -> None:
    image = Extra(2, b"image")
    assert chain(ROOT, as_tokens(range(8)), 4, [image]).keys == chain(ROOT, as_tokens(range(8)), 4).keys
    assert chain(ROOT, as_tokens(range(12)), 4, [image]).keys != chain(ROOT, as_tokens(range(12)), 4).keys


def test_extras_that_would_be_lost_are_refused() -> None:
    with pytest.raises(TokenError, match="two extras"):
        chain(ROOT, as_tokens([1]), 4, [Extra(0, b"a"), Extra(0, b"b")])
    with pytest.raises(TokenError, match="block -1"):
        chain(ROOT, as_tokens([1]), 4, [Extra(-1, b"a")])


@given(st.integers(0, 200))
def test_the_ancestor_is_the_parent_at_the_last_multiple(index: int) -> None:
    made = chain(ROOT, as_tokens(range(201)), 1)
    multiple = index // ANCESTOR_BLOCKS * ANCESTOR_BLOCKS
    assert made.ancestor(index) == (made.keys[multiple - 1] if multiple else ROOT)


@given(IDS, st.sampled_from([np.int64, np.uint32, np.uint64, ">u4"]))
def test_tokens_of_any_integer_type_make_one_chain(ids: list[int], kind: type | str) -> None:
    expected = chain(ROOT, as_tokens(ids), 7).keys
    array = np.array(ids, kind)
    scattered = np.repeat(array, 3)[::3]
    for given_as in (array, scattered, tuple(ids), iter(ids)):
        tokens = as_tokens(given_as)
        assert tokens.dtype == np.uint32
        assert tokens.flags.c_contiguous
        assert chain(ROOT, tokens, 7).keys == expected


def test_tokens_do_not_change_with_the_caller_s_array() -> None:
    mine = np.array([1, 2, 3], np.uint32)
    tokens = as_tokens(mine)
    mine[:] = 9
    assert tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "bad",
    [[-1], [-100, 5], [TOKEN_LIMIT], [2**64], [1.5], [True], ["a"], "text", b"bytes", [[1, 2]], [[1], [1, 2]],
     5, None, [None], np.zeros((2, 2), np.int64), np.array(3)],
)  # fmt: skip
def test_what_is_not_a_row_of_token_ids_is_refused(bad: object) -> None:
    with pytest.raises(TokenError) as caught:
        as_tokens(bad)  # type: ignore[arg-type]
    assert caught.value.remedy


@given(st.text(max_size=20) | st.just("\ud800"), st.text(max_size=20))
def test_salts_are_told_apart_and_not_revealed(salt: str, other: str) -> None:
    assert len(root_key(FINGERPRINT, salt)) == 32
    assert (salt_digest(salt) == salt_digest(other)) == (salt == other)
    assert salt_digest(salt) == salt_digest(salt.encode(errors="surrogatepass"))
    if salt:
        assert len(salt_digest(salt)) == 16
        assert not hashlib.sha256(salt.encode(errors="surrogatepass")).digest().startswith(salt_digest(salt))


def test_a_root_needs_a_whole_fingerprint() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        root_key(b"short", "")


def test_keys_do_not_depend_on_the_process() -> None:
    made = chain(root_key(bytes(32), "salt"), as_tokens([1, 2, 3]), 2, [Extra(1, b"image")])
    assert [key.hex()[:16] for key in made.keys] == ["c8580709e1d49467", "bb1dffdf742d4846"]
