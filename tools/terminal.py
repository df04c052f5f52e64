"""What every command shares with the terminal: results on standard output, all else on standard error.

Owns how errors, Ctrl-C and a closed pipe end a command, and how sizes, tables and progress look. Must not know what
any command does.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn, ParamSpec, TypeAlias

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvstore.errors import KVStoreError, OutputError
from kvstore.tools.entry import INTERRUPTED, interruptible

P = ParamSpec("P")
TERMINATED, PIPE_CLOSED = 143, 141
PLAIN_WIDTH = 160
"""Columns of a table that is not read on a terminal."""


def _one_store(context: typer.Context, value: str | None) -> str | None:
    """The server to ask: never one from the environment where the command names a directory.

    Who says ``--path`` means that store, whatever a shell has exported. Raises a usage error for both on one line.
    """
    said = {name: source.name for name in ("path", "url") if (source := context.get_parameter_source(name))}
    if value is None or said.get("path") != "COMMANDLINE":
        return value
    if said["url"] == "COMMANDLINE":
        raise typer.BadParameter("give --path or --url, not both")
    return None


PathOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--path",
        envvar="KVSTORE_PATH",
        help="The store's directory.",
        show_default=False,
        is_eager=True,
        readable=False,  # the store tells whose it is, by an error with a code of its own
    ),
]
UrlOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="KVSTORE_URL",
        help="Ask kvstore serve there, with the token of KVSTORE_TOKEN, instead of --path.",
        show_default=False,
        callback=_one_store,
    ),
]
JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Step: TypeAlias = Callable[[str, int, int | None], None]
"""Told a stage's name, how much of it is done, and of how much (None: unknown)."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # not rich's exit code 1, which says here that something is wrong


def console() -> Console:
    """Standard output, as it is now."""
    return _Console(file=sys.stdout, width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)


def notes() -> Console:
    """Standard error, as it is now."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """One line for people, on standard error."""
    notes().print(escape(text))


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, sort_keys=False, default=str) + "\n")
    sys.stdout.flush()


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[int] = ()) -> Table:
    """A table for `console`; ``right`` names the columns of numbers."""
    made = Table(title=title, title_justify="left", title_style="bold")
    for index, name in enumerate(columns):
        made.add_column(name, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(escape(str(cell)) for cell in row))
    return made


def command(run: Callable[P, None]) -> Callable[P, None]:
    """The end of a command: an error of ours is one message and its exit code, an interruption is no traceback."""

    @functools.wraps(run)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        with interruptible(), _terminable():
            try:
                run(*args, **kwargs)
                sys.stdout.flush()
            except OutputError as error:
                _give_up_output()
                _fail(f"[bold red]error:[/] {escape(str(error))}", error.exit_code)
            except KVStoreError as error:
                _fail(f"[bold red]error:[/] {escape(str(error))}", error.exit_code)
            except KeyboardInterrupt:
                _fail("interrupted", INTERRUPTED)
            except _Terminated:
                _fail("terminated", TERMINATED)
            except BrokenPipeError:
                _give_up_output()
                raise typer.Exit(PIPE_CLOSED) from None

    return guarded


class _Closed(io.FileIO):
    """Stands for a standard output that was closed."""

    def __init__(self) -> None:
        super().__init__(1, "w", closefd=False)

    def write(self, data: Any) -> NoReturn:
        raise OSError(errno.EBADF, "it is closed")


class _Output(io.TextIOWrapper):
    """Standard output, whose own failures are told apart from those of files that a command works on."""

    def write(self, text: str) -> int:
        with _told():
            return super().write(text)

    def flush(self) -> None:
        with _told():
            super().flush()


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        problem = f"standard output cannot be written: {error.strerror}"
        raise OutputError(problem, "what the command did is done; make room, or send its output elsewhere") from error


def prepare() -> None:
    """Make sure that standard input, output and error are open, before anything else is opened in their place.

    A store's file that became descriptor 1 would be written over by the first word printed.
    """
    closed: set[int] = set()
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
            closed.add(number)
    if sys.stderr is None:
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False))
    raw: io.RawIOBase = _Closed() if 1 in closed else io.FileIO(1, "w", closefd=False)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    sys.stdout = _Output(io.BufferedWriter(raw), encoding, errors="replace", line_buffering=os.isatty(1))


def _give_up_output() -> None:
    """Let what is still buffered go nowhere, so that the interpreter's end does not try again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stdout = io.StringIO()


class _Terminated(BaseException):
    """SIGTERM, turned into an exception so that temporary stores and child processes are cleaned up."""


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until the end of the block: what is begun here, making or cleaning up, is done whole."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda it, _: came.append(it)) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def _fail(text: str, code: int) -> NoReturn:
    with contextlib.suppress(BrokenPipeError):
        notes().print(text)
    raise typer.Exit(code) from None


def confirmed(question: str, yes: bool) -> bool:
    """Whether to go on: ``--yes``, or a person's answer; without a terminal there is nobody to ask."""
    if yes:
        return True
    if not sys.stdin.isatty():
        say(f"{question} Nothing was done: pass --yes where nobody can answer.")
        return False
    return typer.confirm(question, err=True)


@contextlib.contextmanager
def progress() -> Iterator[Step]:
    """A bar a stage on standard error; where that is no terminal, a line for each new text.

    What follows a colon in a stage's name says what it is at, and does not make it another stage.
    """
    screen = notes()
    if not screen.is_terminal:
        seen: set[str] = set()

        def line(stage: str, done: int, total: int | None) -> None:
            if stage not in seen:
                seen.add(stage)
                screen.print(escape(f"{stage} …"))

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, refresh_per_second=2) as bars:
        tasks: dict[str, Any] = {}

        def bar(stage: str, done: int, total: int | None) -> None:
            name = stage.partition(":")[0]
            if name not in tasks:
                tasks[name] = bars.add_task(escape(stage), total=total)
            bars.update(tasks[name], description=escape(stage), completed=done, total=total)

        yield bar
