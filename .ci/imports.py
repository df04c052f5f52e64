"""Import an installed kvstore, module by module, in an environment without torch."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from pathlib import Path

import kvstore

NEED_EXTRA = (
    "kvstore.adapters.",
    "kvstore.tiers.carrier",
    "kvstore.tiers.devicekv",
    "kvstore.tiers.flights",
    "kvstore.tiers.hbm",
    "kvstore.tiers.lanes",
    "kvstore.tiers.pagelock",
    "kvstore.tiers.shuffled",
    "kvstore.tools.api",
    "kvstore.tools.bench_decode",
    "kvstore.tools.connections",
    "kvstore.tools.guard",
    "kvstore.tools.metrics",
    "kvstore.tools.problems",
    "kvstore.tools.resume",
    "kvstore.tools.service",
    "kvstore.tools.tracing",
)
"""Prefixes of what may fail for want of an extra. All else must import with the core's dependencies alone."""


def main() -> None:
    """Exit with a message where a module cannot be imported, or where the test itself would prove nothing."""
    tree = Path(__file__).resolve().parents[1]
    if tree in Path(kvstore.__file__).resolve().parents:
        sys.exit(f"this is the working tree's kvstore, not the wheel's: {kvstore.__file__}")
    if importlib.util.find_spec("torch") is not None:
        sys.exit("torch is installed here: nothing would be proved")
    names = [found.name for found in pkgutil.walk_packages(kvstore.__path__, "kvstore.", onerror=_refuse)]
    core = [name for name in names if not name.startswith(NEED_EXTRA)]
    for name in core:
        importlib.import_module(name)
    if "torch" in sys.modules or len(core) < 10:
        sys.exit(f"only {len(core)} modules were imported: {core}")
    print(f"{len(core)} modules import without torch; {len(names) - len(core)} may need it")


def _refuse(name: str) -> None:
    if not f"{name}.".startswith(NEED_EXTRA):
        sys.exit(f"{name} cannot be imported: {sys.exc_info()[1]!r}")


if __name__ == "__main__":
    main()
