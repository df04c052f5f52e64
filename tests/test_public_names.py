"""What signatures of the store name can be imported from `kvstore`, and costs nothing before it is asked for."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import kvstore

TREE = Path(__file__).resolve().parents[1]
PYTHONS_OWN = {"Callable", "Collection", "EllipsisType", "Iterable", "None", "PathLike", "Sequence", "Unpack"}


def annotations() -> list[str]:
    """Of `kvstore.open` and of every public method and property of what it gives."""
    told = list(inspect.get_annotations(kvstore.open).values())
    for name, member in vars(kvstore.Store).items():
        if not name.startswith("_"):
            told += inspect.get_annotations(member.fget if isinstance(member, property) else member).values()
    return told


def test_every_name_in_a_public_signature_can_be_imported_from_the_package() -> None:
    named = {name for told in annotations() for name in re.findall(r"\b[A-Z]\w+", told)} - PYTHONS_OWN
    assert len(named) > 20
    assert named <= set(kvstore.__all__)


def test_every_name_is_that_of_its_home() -> None:
    homes = {name: home for home, names in kvstore._HOMES.items() for name in names}
    assert sorted([*homes, "__version__", "open"]) == sorted(kvstore.__all__)
    for name, home in homes.items():
        assert getattr(kvstore, name) is getattr(import_module(home), name)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    assert not hasattr(kvstore, "Stone")


def test_importing_it_imports_no_numpy_and_all_of_its_names_no_torch() -> None:
    program = """if True:
        import sys, kvstore
        print(*({"numpy", "lmdb", "torch"} & set(sys.modules)), "before")
        from kvstore import *
        print(Store.__name__, *({"torch"} & set(sys.modules)))
    """
    done = subprocess.run([sys.executable, "-c", program], cwd=TREE, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["before", "Store"]
