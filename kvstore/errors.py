"""Every error that leaves the package.

One class for each thing the caller can do something about, each with an exit code for the command line. A miss is
not an error: it is a value (`kvstore.events`). Must not know anything else of the package.
"""

from __future__ import annotations


class KVStoreError(Exception):
    """Base of all errors raised by kvstore.

    ``problem`` says what is wrong, ``remedy`` what to do next; ``str()`` gives both.
    """

    exit_code = 1

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}\n  {remedy}" if remedy else problem)
        self.problem = problem
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[KVStoreError], tuple[str, str]]:
        """Made again from both parts, so that a pool of processes can hand it over."""
        return type(self), (self.problem, self.remedy)


class SettingsError(KVStoreError):
    """A setting has a value that cannot be used, or a name that does not exist."""

    exit_code = 2


class PathError(KVStoreError):
    """The store's path cannot be created, read or written."""

    exit_code = 3


class FilesystemError(KVStoreError):
    """The store lies on a filesystem on which shared mappings or locks do not hold (NFS, FUSE, 9p), or files (proc)."""

    exit_code = 4


class OwnershipError(KVStoreError):
    """The store belongs to another user."""

    exit_code = 5


class PidNamespaceError(KVStoreError):
    """A live process of another PID namespace has the store open."""

    exit_code = 6


class FormatError(KVStoreError):
    """The directory is not a store, or one of a format this version does not know."""

    exit_code = 7


class DamagedError(KVStoreError):
    """A file of the store is truncated, missing or foreign, and the store cannot be opened safely."""

    exit_code = 8


class BudgetError(KVStoreError):
    """A budget is too small to hold anything, or larger than its medium."""

    exit_code = 9


class BusyError(KVStoreError):
    """Another process holds what this call needs, and the call's deadline has passed."""

    exit_code = 10


class LayoutError(KVStoreError):
    """A layout is impossible, or tensors do not have the shape their layout says."""

    exit_code = 11


class TokenError(KVStoreError):
    """Token ids that cannot be keyed: negative, too large, or not a flat sequence of integers."""

    exit_code = 12


class NotFoundError(KVStoreError):
    """A name, prefix or namespace that the store does not hold."""

    exit_code = 13


class AmbiguousError(KVStoreError):
    """An abbreviation that fits more than one thing."""

    exit_code = 14


class ClosedError(KVStoreError):
    """The store was closed, or the process was forked after it was opened."""

    exit_code = 15


class UnsupportedError(KVStoreError):
    """A model, a cache or a mode of generation whose KV must not be reused, by name."""

    exit_code = 16


class MissingExtraError(KVStoreError):
    """An optional dependency of this function is not installed."""

    exit_code = 17


class NoSpaceError(KVStoreError):
    """A medium or an index is full, and nothing could be evicted to make room."""

    exit_code = 18


class StorageError(KVStoreError):
    """A medium reported an error: the store goes on without it."""

    exit_code = 19


class EngineError(KVStoreError):
    """A served engine did not answer, refused, or did not store what it computed."""

    exit_code = 20


class OutputError(KVStoreError):
    """Standard output cannot be written: what a command did is done, and nobody was told."""

    exit_code = 21


class RamDirectoryError(KVStoreError):
    """``ram_directory`` is not there, is not on tmpfs, or is not the one that others use for this store."""

    exit_code = 22


class FullError(KVStoreError):
    """A disk or tmpfs has no room for the little that opening writes; nothing that is stored is lost."""

    exit_code = 23


CONTAINED = (StorageError, NoSpaceError, DamagedError, BusyError)
"""What a load or a save comes upon that is not its caller's fault: told as an event, and ends in a miss, or unsaved."""
