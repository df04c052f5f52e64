"""What a user can set, validated once.

Sources, the first that names a setting wins: arguments; ``KVSTORE_*`` in the environment; a TOML file, the one that
``KVSTORE_CONFIG`` names, else ``kvstore.toml`` in the store's directory; defaults. Budgets are ceilings: nothing is
taken before it is needed. Must not know the host (`kvstore.host` caps budgets) or what settings are used for.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

from kvstore.errors import SettingsError
from kvstore.sizes import GIB, MIB, parse_size

CONFIG_FILE = "kvstore.toml"
PREFIX = "KVSTORE_"
OTHER_VARIABLES = frozenset({"KVSTORE_CONFIG", "KVSTORE_TOKEN", "KVSTORE_URL"})
"""Variables with our prefix that are not settings."""

_SERVICE_LINK = re.compile(r"KVSTORE_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")
"""What Kubernetes sets in every container beside a service named ``kvstore``; not ours."""

PAGE = 4096
DirectIO: TypeAlias = Literal["auto", "on", "off"]
_Reader: TypeAlias = Callable[[object], object]


def _default_copy_threads() -> int:
    return min(4, max(2, len(os.sched_getaffinity(0))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every setting of one store. Raises SettingsError for a value that cannot be used.

    Sizes are bytes; where a value is read from a source it may be a string such as ``20GiB``.
    """

    path: Path
    """The store's directory."""
    ram: int = 2 * GIB
    """Budget of the `ram` tier, index included; not 0, since every block passes through it."""
    nvme: int = 20 * GIB
    """Budget of the `nvme` tier, index included; 0 turns it off."""
    hbm: int = 0
    """Budget of the `hbm` tier; 0 turns it off."""
    device: str | None = None
    """Where the `hbm` tier lives: ``cuda``, ``cuda:1`` or ``cpu``; ``cuda`` where none is named."""
    ram_directory: Path = Path("/dev/shm")
    """A directory on tmpfs; the store makes one of its own in it."""
    ram_segment_bytes: int = 64 * MIB
    """Size of a segment file of the `ram` tier, a multiple of 4096."""
    nvme_segment_bytes: int = 256 * MIB
    """Size of a segment file of the `nvme` tier, a multiple of 4096."""
    copy_threads: int = field(default_factory=_default_copy_threads)
    """Threads that copy payloads, 1…16; 2 to 4 fill the memory bus of most hosts."""
    io_threads: int = 4
    """Threads that read `nvme` segments, 1…64."""
    verify_share: int = 64
    """One in this many reads from `ram` is checked against its checksum; 1 checks every one."""
    lock_timeout_s: float = 0.5
    """How long a request waits for a lock before it goes on uncached."""
    lease_s: float = 60.0
    """How long a lease keeps blocks in `ram` from eviction, where its taker gives no time and does not release it."""
    mover_batch_bytes: int = 64 * MIB
    """What the mover writes to `nvme` at once."""
    mover_queue_bytes: int = GIB
    """What may wait for the mover; the oldest is dropped, and counted, past it."""
    dead_owner_grace_s: float = 10.0
    """How long after a process died its unfinished slots are left alone: device copies may still be in flight."""
    direct_io: DirectIO = "auto"
    """O_DIRECT on `nvme`: ``auto`` where the filesystem has it, ``on`` to insist, ``off`` for buffered files."""

    def __post_init__(self) -> None:
        for name, read in _READERS.items():
            object.__setattr__(self, name, _read("the settings", name, read, getattr(self, name)))
        if self.mover_queue_bytes < self.mover_batch_bytes:
            raise SettingsError(
                f"mover_queue_bytes is {self.mover_queue_bytes}, one batch of the mover {self.mover_batch_bytes}",
                "make mover_queue_bytes at least as large as mover_batch_bytes",
            )

    @classmethod
    def resolve(
        cls,
        path: str | os.PathLike[str] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        **arguments: object,
    ) -> Settings:
        """Settings from all sources.

        path: the store's directory, else ``KVSTORE_PATH``, else ``path`` in the file of ``KVSTORE_CONFIG``.
        arguments: settings by name; None means not given. environ: instead of the process's own environment.
        Raises SettingsError that names the source and says what to write instead.
        """
        given = {name: value for name, value in {"path": path, **arguments}.items() if value is not None}
        values = _checked("the argument", given)
        variables = os.environ if environ is None else environ
        values = {**_from_environment(variables), **values}
        values = {**_from_file(variables.get("KVSTORE_CONFIG") or None, values.get("path")), **values}
        if "path" not in values:
            raise SettingsError("no store was named", "pass a directory, or set KVSTORE_PATH")
        return cls(**values)  # type: ignore[arg-type]  # every value went through its reader

    def to_dict(self) -> dict[str, str | int | float | None]:
        """Every setting by name, as JSON can hold it."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def _from_environment(variables: Mapping[str, str]) -> dict[str, object]:
    """Settings from ``KVSTORE_*``; an empty variable counts as unset."""
    found: dict[str, object] = {}
    for variable in sorted(variables):
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES or _SERVICE_LINK.fullmatch(variable):
            continue
        if variables[variable] != "":
            name = variable.removeprefix(PREFIX).lower()
            if variable != PREFIX + name.upper():
                name = variable  # mixed case: no setting has such a name
            found |= _checked("the environment variable", {name: variables[variable]}, shown=variable)
    return found


def _from_file(named: str | None, path: object) -> dict[str, object]:
    """Settings from the file that the environment names, else from the store's own file, else none."""
    if named is not None:
        return _checked(f"{named}:", _parse(Path(os.path.expanduser(named)), must_exist=True))
    if not isinstance(path, Path):
        return {}
    own = path / CONFIG_FILE
    table = _parse(own, must_exist=False)
    if "path" in table:
        raise SettingsError(f"{own} sets path, but lies in the store it configures", "take that line out")
    return _checked(f"{own}:", table)


def _parse(file: Path, *, must_exist: bool) -> dict[str, object]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        if must_exist:
            raise SettingsError(f"KVSTORE_CONFIG names {file}, which is not there", "create it, or unset it") from error
        return {}
    except OSError as error:
        if not must_exist and not os.access(file.parent, os.X_OK):
            return {}  # the whole directory is closed to this user: opening the store says why
        raise SettingsError(f"cannot read {file}: {error.strerror}", "make it a file this user can read") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file} is not TOML: {error}", 'write lines such as: ram = "2GiB"') from error


def _checked(source: str, table: Mapping[str, object], shown: str | None = None) -> dict[str, object]:
    """``table`` with every value read. shown: the name to use in messages instead of the setting's own."""
    values: dict[str, object] = {}
    for name, value in table.items():
        read = _READERS.get(name)
        if read is None:
            raise SettingsError(f"{source} {shown or name} is not a setting", _suggestion(name, shown))
        values[name] = _read(source, shown or name, read, value)
    return values


def _suggestion(name: str, shown: str | None) -> str:
    near = difflib.get_close_matches(name.lower(), _READERS, n=1)
    names = [PREFIX + known.upper() if shown else known for known in near or sorted(_READERS)]
    return f"did you mean {names[0]}?" if near else f"settings are {', '.join(names)}"


def _read(source: str, name: str, read: _Reader, value: object) -> object:
    """The value, as its setting's reader understands it; errors are told with their source."""
    try:
        return read(value)
    except SettingsError as error:
        raise SettingsError(f"{source} {name}: {error.problem}", error.remedy) from error


def _size(value: object, least: int = 0, multiple: int = 1) -> int:
    if isinstance(value, float):
        raise SettingsError(f"{value!r} is not a size", f'write whole bytes, or a string with a unit: "{value:g}GiB"')
    size = parse_size(value)  # type: ignore[arg-type]  # it refuses other types itself
    if size < least:
        raise SettingsError(f"{value!r} is too small", f"write at least {least} bytes")
    if size % multiple:
        raise SettingsError(f"{value!r} is not a multiple of {multiple} bytes", "write a size such as 64MiB")
    return size


def _ram_size(value: object) -> int:
    size = _size(value)
    if not size:
        raise SettingsError(f"{value!r}, and every block passes through it", "give ram a budget, 64MiB or more")
    return size


def _count(value: object, most: int) -> int:
    number = int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,19}", value.strip()) else value
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= most:
        raise SettingsError(f"{value!r} is not a whole number in 1…{most}", "write digits only, such as 2")
    return number


def _seconds(value: object, positive: bool) -> float:
    try:
        seconds = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        seconds = math.nan
    if not math.isfinite(seconds) or seconds < 0 or (positive and seconds == 0):
        raise SettingsError(f"{value!r} is not a number of seconds", "write a number such as 0.5, without a unit")
    return seconds


def _path(value: object) -> Path:
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise SettingsError(f"{value!r} is not a path", "write a directory's name")
    text = os.fspath(value)
    if not text.strip() or "\0" in text:
        raise SettingsError(f"{value!r} is not a path", "write a directory's name")
    return Path(os.path.abspath(os.path.expanduser(text)))


def _device(value: object) -> str | None:
    if value is None or (isinstance(value, str) and re.fullmatch(r"[a-z]+(:[0-9]{1,4})?", value)):
        return value
    raise SettingsError(f"{value!r} is not a device", "write cuda, cuda:0 or cpu")


def _direct_io(value: object) -> str:
    if isinstance(value, str) and value in ("auto", "on", "off"):
        return value
    raise SettingsError(f"{value!r} is not a mode of direct I/O", "write auto, on or off")


_READERS: Mapping[str, _Reader] = {
    "path": _path,
    "ram": _ram_size,
    "nvme": _size,
    "hbm": _size,
    "device": _device,
    "ram_directory": _path,
    "ram_segment_bytes": partial(_size, least=PAGE, multiple=PAGE),
    "nvme_segment_bytes": partial(_size, least=PAGE, multiple=PAGE),
    "copy_threads": partial(_count, most=16),
    "io_threads": partial(_count, most=64),
    "verify_share": partial(_count, most=2**31),
    "lock_timeout_s": partial(_seconds, positive=False),
    "lease_s": partial(_seconds, positive=True),
    "mover_batch_bytes": partial(_size, least=PAGE),
    "mover_queue_bytes": partial(_size, least=PAGE),
    "dead_owner_grace_s": partial(_seconds, positive=False),
    "direct_io": _direct_io,
}
