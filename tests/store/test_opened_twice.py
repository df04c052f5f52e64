"""What `kvstore.open` is given has an effect, or is refused by name: beside settings, and in a store that is open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from known_kv import SMALL

import kvstore
from kvstore.errors import SettingsError
from kvstore.settings import Settings


@pytest.mark.parametrize("beside", [{"path": "x"}, {"ram": "4GiB"}, {"path": "x", "nvme": 0}], ids=" and ".join)
def test_settings_with_anything_beside_them_are_refused(tmp_path: Path, memory: Path, beside: dict[str, Any]) -> None:
    settings = Settings.resolve(tmp_path / "kv", environ={}, ram_directory=memory, **SMALL)
    with pytest.raises(SettingsError, match=f"and {', '.join(beside)} beside them"):
        kvstore.open(settings=settings, **beside)
    assert list(tmp_path.iterdir()) == []
    with kvstore.open(None, settings=settings, ram=None) as store:
        assert store.settings == settings
