"""The page on limits is true: its table is that of the code, its options exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.adapters.vllm.allow import REASONS
from kvstore.adapters.vllm.options import read_options
from kvstore.errors import SettingsError

PAGE = (Path(__file__).resolve().parents[2] / "adapters" / "vllm" / "LIMITS.md").read_text()


def test_every_reason_is_listed_as_the_code_has_it() -> None:
    table = PAGE.split("<!-- generated: refusals -->\n")[1].split("<!-- end -->")[0]
    assert table.splitlines()[2:] == [f"| `{code}` | {reason} |" for code, reason in REASONS.items()]


def test_options_that_the_page_names_are_read() -> None:
    given = {"path": "/data", "ram": "1GiB", "gate": False, "least_tokens": 64, "later_bytes": "1GiB"}
    options = read_options(given)
    assert options.store == {"path": "/data", "ram": "1GiB"}
    assert (options.gate, options.least_tokens, options.later_bytes) == (False, 64, 1 << 30)
    assert all(f"`{name}`" in PAGE for name in given)


@pytest.mark.parametrize("given", [{"gates": True}, {"gate": "yes"}, {"least_tokens": 0}, {"later_bytes": "many"}])
def test_options_that_cannot_be_used_are_refused_with_what_to_write(given: dict[str, object]) -> None:
    with pytest.raises(SettingsError) as refused:
        read_options(given)
    assert refused.value.remedy
