"""Places of this process's Python threads, for verdicts on ranks that hold up the others."""

from __future__ import annotations

import functools
import os
import site
import sys
import sysconfig
import threading
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, WrapperDescriptorType

import torch

from torchcomms_pg import _C, env

Frame = tuple[str, int, str]  # file, line, function; the innermost comes first

_FRAMES = 3
_THREADS = 4
_MESSAGE = 120  # characters of an exception's message
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
_OWN = (f"{Path(__file__).parents[1]}{os.sep}", f"{_TORCH}{os.sep}", "<frozen")
_STDLIB = f"{sysconfig.get_path('stdlib')}{os.sep}"
# torch may lie anywhere: in another Python's or the user's folder, on PYTHONPATH, or in a checkout.
_LIBRARIES = (*_OWN, *_PLACES)
# Folders that the name of a file begins in, and the working directory after them.
_FOLDERS = (*_PLACES, str(_TORCH.parent))
_CHECKOUT = str(Path(__file__).parents[2])
# Frames between an operation and its caller in torch, and below a thread's function.
_C10D = tuple(
    str(_TORCH / "distributed" / name) for name in ("distributed_c10d.py", "c10d_logger.py")
)
# Files of functions that stand in for torch's: their callers have called torch.
_STAND_INS = (f"{Path(__file__).parent}{os.sep}", str(Path(__file__).parents[1] / "_patches.py"))
_STANDARD = tuple(
    f"{sysconfig.get_path('stdlib')}{os.sep}{name}" for name in ("threading.py", "concurrent")
)


def watch_over_monitor() -> None:
    """Watches for a stuck monitor and a held GIL, while the monitor runs."""
    _C.watch_over_monitor(env.heartbeat_timeout(), env.stuck_monitor_ends_process())


def describe(issued: list[list[Frame]]) -> tuple[str, list[str], dict[int, str]]:
    """Returns the places of the user's threads, the places of stacks `issued`, and threads' names.

    A thread's place is the innermost lines of the user's own files, and before them the library
    function that these lines called. The main thread comes first; other threads without a line of
    the user are left out. A place in `issued` has only the user's lines, if the stack has any, and
    the name of the thread that is still there, unless it is the main thread. The exception that a
    thread handles follows.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate() if thread.ident}
    main = threading.main_thread().ident
    stacks = {
        ident: _without_stand_ins(
            [(code.co_filename, line, code.co_name) for code, _, line in calls]
        )
        for ident, calls in _C.thread_stacks().items()
    }
    handled = _handled()
    lines = []
    for ident, frames in sorted(stacks.items(), key=lambda item: item[0] != main):
        if ident == main or any(map(_is_users, frames)):
            line = f"{names.get(ident, 'a thread')}: {_tell(frames)}"
            lines.append(line + _and_handles(handled.get(ident)))
    if len(lines) > _THREADS:
        lines[_THREADS:] = [f"and {len(lines) - _THREADS} more threads"]
    places = []
    for stack in map(_without_stand_ins, issued):
        place = _tell([frame for frame in stack if _is_users(frame)] or _outside_of_c10d(stack))
        within = [ident for ident, frames in stacks.items() if stack and _is_part(stack, frames)]
        if len(within) == 1:
            name = names.get(within[0])
            place += f" (in thread {name})" if name and within[0] != main else ""
            place += _and_handles(handled.get(within[0]))
        places.append(place)
    return "\n".join(lines), places, names


def place(frame: FrameType | None) -> str:
    """Returns the place of the stack whose innermost frame is `frame`.

    The place is the line of the user, and before it the line of the library that the user called.
    Without such lines it is the innermost one.
    """
    return text_of(place_frames(frame))


def place_frames(frame: FrameType | None) -> list[Frame]:
    """Returns the frames whose lines `place` tells."""
    chosen: list[Frame] = []
    last = None
    while frame is not None:
        code = frame.f_code
        kind = _kind(code.co_filename)
        if kind is not None:
            last = frame
        if kind == "user" or (kind == "library" and not chosen):
            chosen.append((code.co_filename, frame.f_lineno, code.co_name))
        if kind == "user":
            return chosen
        frame = frame.f_back
    if not chosen and last is not None:
        chosen.append((last.f_code.co_filename, last.f_lineno, last.f_code.co_name))
    return chosen


def text_of(frames: Iterable[Frame]) -> str:
    """Returns the text of frames, the innermost first."""
    return " <- ".join(f"{line_name(file, line)} in {name}" for file, line, name in frames)


def line_name(file: str, line: int) -> str:
    """Returns a line's name for people: a path and the line, or a notebook's cell."""
    shell = sys.modules.get("IPython")
    try:
        cell = shell.get_ipython().compile._filename_map.get(file) if shell else None
    except AttributeError:
        cell = None
    return f"{_short(file)}:{line}" if cell is None else f"Cell In[{cell}], line {line}"


def _handled() -> dict[int, BaseException]:
    """Returns the exception that each thread handles: in an `except`, a `finally` or an exit."""
    found = {}
    for ident, told in _C.current_exceptions().items():
        error = told[1] if isinstance(told, tuple) else told  # a tuple in Python 3.11
        if isinstance(error, BaseException):
            found[ident] = error
    return found


def _and_handles(error: BaseException | None) -> str:
    return "" if error is None else f"; handles {named(error)}"


def named(error: BaseException) -> str:
    """Names an exception and the line that raised it, without running code of its class."""
    kind = type(error)
    text = kind.__name__
    plain = all(type(each) in (str, int, float, bool, type(None)) for each in error.args)
    if plain and isinstance(kind.__str__, WrapperDescriptorType):
        message = " ".join(str(error).split())
        if len(message) > _MESSAGE:
            message = message[: _MESSAGE - 3] + "..."
        text += f": {message}" if message else ""
    frames = []
    traced = error.__traceback__
    while traced is not None:
        code = traced.tb_frame.f_code
        frames.append((code.co_filename, traced.tb_lineno, code.co_name))
        traced = traced.tb_next
    raised = next((frame for frame in reversed(frames) if _is_users(frame)), None)
    if raised is not None:
        text += f", raised at {line_name(raised[0], raised[1])} in {raised[2]}"
    return text


def _is_part(stack: list[Frame], frames: list[Frame]) -> bool:
    """Returns whether a thread with `frames` is still in the innermost call of `stack`."""
    return len(frames) >= len(stack) and frames[len(frames) - len(stack) :] == stack


def _outside_of_c10d(stack: list[Frame]) -> list[Frame]:
    """Returns the library's frames that say what an operation was for."""
    left = [frame for frame in stack if not frame[0].startswith((*_C10D, *_STANDARD))]
    return [*left[:2], *left[2:][-1:]] or stack


def caller() -> str:
    """Returns the place of the calling thread: its innermost lines of the user's own files."""
    frames = list(_walk(sys._getframe(1)))
    return _tell([frame for frame in frames if _is_users(frame)] or frames)


def in_hand() -> str:
    """Returns the exception that the calling thread handles, with its line; "" for an exit."""
    error = sys.exc_info()[1]
    return "" if error is None or isinstance(error, SystemExit) else named(error)


def _walk(frame: FrameType | None) -> Iterable[Frame]:
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_STAND_INS):
            yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def _without_stand_ins(frames: list[Frame]) -> list[Frame]:
    return [frame for frame in frames if not frame[0].startswith(_STAND_INS)]


@functools.lru_cache(maxsize=4096)
def _kind(file: str) -> str | None:
    """Returns whose a file is: the user's, a library's, or of what is between them and operations.

    The latter are torch, this package and Python, and torch's decorators. None is for modules whose
    functions stand in for torch's.
    """
    if file.startswith(_STAND_INS):
        return None
    if file.startswith(_OWN) or file.endswith(f"{os.sep}typing_extensions.py"):
        return "between"
    if file.startswith(_STDLIB) and "-packages" not in file:
        return "between"
    return "library" if file.startswith(_LIBRARIES) else "user"


def _is_users(frame: Frame) -> bool:
    return not frame[0].startswith(_LIBRARIES)


def _tell(frames: list[Frame]) -> str:
    chosen = [frame for frame in frames if _is_users(frame)]
    if not chosen:
        chosen = frames
    elif frames[0] not in chosen:
        chosen.insert(0, frames[0])  # the innermost frame, of the library that the user called
    return " <- ".join(
        f"{line_name(file, line)} in {name}" for file, line, name in chosen[:_FRAMES]
    )


def _short(file: str) -> str:
    for folder in (*_FOLDERS, os.getcwd(), _CHECKOUT):
        if file.startswith(folder):
            return file[len(folder) :].lstrip(os.sep).removeprefix("site-packages" + os.sep)
    return file
