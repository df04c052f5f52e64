"""The index without a trace of what was deleted from it: pages written anew, and zeros over what they were.

LMDB deletes a record by forgetting where it is: its bytes stay in free pages, in the gaps of live ones, in the
separators of branches, and in the dirty pages that a writing process keeps for its next transaction. `forget` clears
the last, `rewrite` all that is live, `overwrite_free` the free pages. Must not know what the records mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvstore.errors import BusyError, NoSpaceError
from kvstore.index import Index
from kvstore.transaction import PAGE, Database, Transaction, get_number, put_number

WIPE_EPOCH, WIPED = b"wipe epoch", b"wiped:"
FORGOTTEN_PAGES = 8192
"""Dirty pages that `forget` clears: more than any transaction of ours writes but a rewriting one."""
WINDOW_PAGES = 2048
READER_WAIT_S = 30.0
_FILL = b"fill:"
Progress = Callable[[int, int], None]


class _Undone(Exception):
    """Ends a transaction that must not be committed."""


class WipeLog:
    """Which wipes there were, and which processes have cleared their memory since. Kept in the lowest tier's index."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def epoch(self) -> int:
        """The number of the last wipe."""
        with self._index.read() as txn:
            return get_number(txn, WIPE_EPOCH)

    def begin(self) -> int:
        """Another wipe; every process is to clear its memory, and to confirm. Returns its number."""

        def work(txn: Transaction) -> int:
            epoch = get_number(txn, WIPE_EPOCH) + 1
            put_number(txn, WIPE_EPOCH, epoch)
            for key in [key for key, _ in txn.scan(Database.META, WIPED)]:
                txn.delete(Database.META, key)
            return epoch

        return self._index.write(work)

    def confirm(self, owner: bytes, epoch: int) -> None:
        """Note that a process has cleared its memory since a wipe began."""
        self._index.write(lambda txn: txn.put(Database.META, WIPED + owner, epoch.to_bytes(8, "little")))

    def confirmed(self, epoch: int) -> set[bytes]:
        """Owners that have confirmed a wipe."""
        with self._index.read() as txn:
            found = [(key[len(WIPED) :], raw) for key, raw in txn.scan(Database.META, WIPED)]
        return {owner for owner, raw in found if int.from_bytes(raw, "little") >= epoch}


def forget(index: Index) -> None:
    """Clear the dirty pages that this process keeps: zeros are written to as many, and never committed.

    As many as the index has room for: no transaction can have had more.
    """
    count = min(FORGOTTEN_PAGES, index.size // PAGE)

    def work(txn: Transaction) -> None:
        txn.fill(Database.META, _FILL, count)
        raise _Undone

    while count:
        try:
            index.write(work)
        except NoSpaceError:
            count = count * 3 // 4
        except _Undone:
            return


def rewrite(index: Index) -> int:
    """Write every database anew, in one transaction, which every writer waits for; its number.

    Also those that never held a token: the gaps of their pages may have. Alone in its transaction: it copies what was
    committed before. Raises NoSpaceError where the index has no room for both.
    """

    def work(txn: Transaction) -> int:
        with index.read() as before:
            for db in Database:
                txn.clear(db)
                txn.append(db, before.scan(db))
        return txn.number

    return index.write(work, alone=True)


def overwrite_free(index: Index, since: int, step: Progress) -> None:
    """Write zeros over every page that was freed up to the transaction ``since``.

    LMDB takes the pages freed longest ago first, and none that a reader still needs: readers of that time are waited
    for. Raises BusyError when one does not end.
    """
    for _ in range(2):  # what a transaction freed is taken two transactions later
        index.write(lambda txn: txn.put(Database.META, _FILL, b""))
    until = time.monotonic() + READER_WAIT_S
    while (oldest := index.oldest_reader()) is not None and oldest <= since:
        if time.monotonic() > until:
            raise BusyError(f"a process has read the {index.name} index for {READER_WAIT_S:.0f} s", "end it, try again")
        index.check_readers()
        time.sleep(0.05)
    with index.read() as txn:
        live = txn.live_bytes()
    free = (index.used_bytes() - live) // PAGE
    window = max(16, min(WINDOW_PAGES, (index.size - live) // PAGE // 8))
    done = 0
    while done < free + window:
        index.write(lambda txn: txn.fill(Database.META, _FILL, window))
        index.write(lambda txn: txn.unfill(Database.META, _FILL))
        done += window
        step(min(done, free), free)
    index.write(lambda txn: txn.unfill(Database.META, _FILL))
    index.sync()
