"""Places of this process's Python threads, for verdicts on ranks that hold up the others."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
import threading
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import torch

from torchcomms_pg import _C, env

Frame = tuple[str, int, str]  # file, line, function; the innermost comes first

_FRAMES = 3
_THREADS = 4
_TORCH = Path(torch.__file__).parent
_PLACES = tuple(
    f"{folder}{os.sep}"
    for folder in (
        *([_TORCH.parent] if _TORCH.parent.name in ("site-packages", "dist-packages") else []),
        *(sysconfig.get_path(name) for name in ("stdlib", "platlib", "purelib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
    )
)
_OWN = (f"{Path(__file__).parent}{os.sep}", f"{_TORCH}{os.sep}", "<frozen")
_STDLIB = f"{sysconfig.get_path('stdlib')}{os.sep}"
# torch may lie anywhere: in another Python's or the user's folder, on PYTHONPATH, or in a checkout.
_LIBRARIES = (f"{Path(__file__).parent}{os.sep}", f"{_TORCH}{os.sep}", *_PLACES)


def watch_over_monitor() -> None:
    """Watches for a stuck monitor and a held GIL, while the monitor runs."""
    _C.watch_over_monitor(env.heartbeat_timeout(), env.stuck_monitor_ends_process())


def describe(issued: list[list[Frame]]) -> tuple[str, list[str]]:
    """Returns the places of the user's threads, a line each, and the places of stacks `issued`.

    A thread's place is the innermost lines of the user's own files, and before them the library
    function that these lines called. The main thread comes first; other threads without a line of
    the user are left out. A place in `issued` has only the user's lines, if the stack has any.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    lines = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        frames = list(_walk(frame))
        if ident == main or any(map(_is_users, frames)):
            lines.append(f"{names.get(ident, 'a thread')}: {_tell(frames)}")
    if len(lines) > _THREADS:
        lines[_THREADS:] = [f"and {len(lines) - _THREADS} more threads"]
    places = [_tell([frame for frame in stack if _is_users(frame)] or stack) for stack in issued]
    return "\n".join(lines), places


def place(frame: FrameType | None) -> str:
    """Returns the place of the stack whose innermost frame is `frame`.

    The place is the line of the user, and before it the line of the library that the user called.
    Without such lines it is the innermost one.
    """
    frames = list(_walk(frame))
    outside = [each for each in frames if not _is_between(each[0])] or frames[-1:]
    users = [each for each in outside if _is_users(each)]
    chosen = [outside[0], *(each for each in users[:1] if each != outside[0])]
    return " <- ".join(f"{_short(file)}:{line} in {name}" for file, line, name in chosen)


def _walk(frame: FrameType | None) -> Iterable[Frame]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def _is_between(file: str) -> bool:
    """Returns whether a file is torch's, this package's or Python's, or has torch's decorators."""
    if file.startswith(_OWN) or file.endswith(f"{os.sep}typing_extensions.py"):
        return True
    return file.startswith(_STDLIB) and "-packages" not in file


def _is_users(frame: Frame) -> bool:
    return not frame[0].startswith((*_LIBRARIES, "<frozen"))


def _tell(frames: list[Frame]) -> str:
    chosen = [frame for frame in frames if _is_users(frame)]
    if frames and frames[0] not in chosen:
        chosen.insert(0, frames[0])  # the innermost frame, of the library that the user called
    return " <- ".join(f"{_short(file)}:{line} in {name}" for file, line, name in chosen[:_FRAMES])


def _short(file: str) -> str:
    for folder in (*_PLACES, str(_TORCH.parent), os.getcwd(), str(Path(__file__).parents[1])):
        if file.startswith(folder):
            return file[len(folder) :].lstrip(os.sep).removeprefix("site-packages" + os.sep)
    return file
