"""Sizes are read exactly or refused; what is printed can be read again."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import SettingsError
from kvstore.sizes import SIZE_LIMIT, counted, format_size, parse_size

UNITS = {
    "": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50,
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "count"),
    [("20GiB", 20 << 30), ("500MB", 500_000_000), ("1.5 GiB", 3 << 29), ("4096", 4096), ("0", 0), (" 2 kib ", 2048)],
)
def test_sizes_as_people_write_them(text: str, count: int) -> None:
    assert parse_size(text) == count


@given(st.integers(0, 8000), st.integers(0, 999), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " ", "\t"]))
def test_a_number_with_a_unit_is_exact_to_the_byte(whole: int, thousandths: int, unit: str, space: str) -> None:
    text = f"{whole}.{thousandths:03}{space}{unit}"
    exact = (whole + Fraction(thousandths, 1000)) * UNITS[unit]
    assert parse_size(text) == parse_size(text.upper()) == parse_size(text.lower()) == int(exact)


@given(st.integers(0, 1 << 62))
def test_what_is_printed_reads_back_within_half_a_percent(count: int) -> None:
    printed = format_size(count)
    assert abs(parse_size(printed) - count) <= 1 + count / 200
    assert len(printed) <= len("1023.99 KiB") or printed.endswith("PiB")


@given(st.integers(0, 1023), st.sampled_from(["B", "KiB", "MiB", "GiB", "TiB", "PiB"]))
def test_a_whole_number_of_a_unit_is_printed_as_it_is(number: int, unit: str) -> None:
    printed = format_size(number * UNITS[unit])
    assert printed == (f"{number} {unit}" if number else "0 B")


def test_rounding_never_prints_1024_of_a_unit() -> None:
    assert format_size((1 << 20) - 1) == "1 MiB"
    assert format_size((1 << 30) - 1) == "1 GiB"
    with pytest.raises(ValueError, match="not negative"):
        format_size(-1)


@given(st.text(max_size=30) | st.from_regex(r"[0-9]{1,25}(\.[0-9]{0,12})? ?[a-zA-Z]{0,4}", fullmatch=True))
def test_any_text_is_a_size_or_refused_with_a_remedy(text: str) -> None:
    try:
        count = parse_size(text)
    except SettingsError as error:
        refusal = error
    else:
        assert 0 <= count <= SIZE_LIMIT
        assert text.strip()[0].isascii()
        return
    assert repr(text) in refusal.problem
    assert refusal.remedy


@pytest.mark.parametrize(
    "bad", [-1, 2**63, True, None, 1.5, b"1", [1], "1e9", "-5MB", "1_000", "GiB", "", "٣GiB", "1.GiB", "nan"]
)
def test_what_is_not_a_size_is_refused(bad: object) -> None:
    with pytest.raises(SettingsError):
        parse_size(bad)  # type: ignore[arg-type]


def test_a_bare_letter_is_refused_and_both_meanings_are_offered() -> None:
    with pytest.raises(SettingsError, match=r"20GiB .* or 20GB"):
        parse_size("20G")


def test_one_of_something_is_not_many() -> None:
    assert [counted(number, "block") for number in (0, 1, 2000)] == ["0 blocks", "1 block", "2,000 blocks"]
    assert counted(2, "process") == "2 processes"
