"""How the whole suite runs."""

from __future__ import annotations

from hypothesis import settings

# A deadline would make the suite fail on a busy machine, not on a wrong program.
settings.register_profile("kvstore", deadline=None)
settings.load_profile("kvstore")
