"""The dialogue with NCCL's RAS client, ncclras, in protocol 2 (NCCL 2.30, src/ras).

A client sends lines in any order, in upper or lower case: "CLIENT PROTOCOL N", "TIMEOUT SECONDS",
"SET FORMAT text" or "json", and "MONITOR" or "MONITOR GROUPS". Each line gets an answer of one
line. "STATUS" or "VERBOSE STATUS" ends the dialogue, and gets the status as its answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

# Most bytes of a line. Also, the gateway stops reading from a client while this many bytes of its
# answers are unsent.
LONGEST_LINE = 1024

# Largest time limit in seconds that a client can set. Other clients wait meanwhile, too.
LONGEST_WAIT = 10.0

# Events of these groups can be monitored.
LIFECYCLE = "lifecycle"
TRACE = "trace"

_DONE = "OK\n"


@dataclass(frozen=True)
class Question:
    """The question for the status of the job.

    Attributes:
        as_json: whether the answer is to be JSON, not text.
        verbose: whether no list of the text is to be shortened.
        wait: seconds to wait for answers of processes. The default is below one second, since some
            clients set no timeout and read for one second only.
    """

    as_json: bool = False
    verbose: bool = False
    wait: float = 0.8


class Dialogue:
    """The lines that one client has sent so far.

    Attributes:
        asked: the client's question, or None if it has not asked. Later lines are ignored.
        events: the groups of events that the client monitors.
        as_json: whether the client wants JSON.
    """

    def __init__(self) -> None:
        self.asked: Question | None = None
        self.events: frozenset[str] = frozenset()
        self._question = Question()
        self._heard = b""  # the received part of an incomplete line

    @property
    def as_json(self) -> bool:  # noqa: D102
        return self._question.as_json

    def hear(self, received: bytes) -> str | None:
        """Takes bytes that the client has sent.

        Returns:
            the answers to the lines that are complete now, or None if a line is too long.
        """
        self._heard += received
        answers = ""
        while self.asked is None:
            line, end, rest = self._heard.partition(b"\n")
            if len(line) > LONGEST_LINE:
                return None
            if not end:
                break
            self._heard = rest
            # telnet ends lines with "\r\n"
            answers += self._obey(line.removesuffix(b"\r").decode(errors="backslashreplace"))
        return answers

    def _obey(self, line: str) -> str:
        known = line.lower()
        if known.startswith("client protocol "):
            return "SERVER PROTOCOL 2\n"
        if known.startswith("timeout "):
            return self._set_timeout(line[len("timeout ") :])
        if known.startswith("set format "):
            form = known[len("set format ") :]
            if form not in ("text", "json"):
                return refused(
                    f"the format is text or json, not {printable(line[len('set format ') :])}"
                )
            self._question = replace(self._question, as_json=form == "json")
            return _DONE
        if known in ("status", "verbose status"):
            self.asked = replace(self._question, verbose=known != "status")
            return ""
        if known == "monitor":
            return self._set_events(LIFECYCLE)
        if known.startswith("monitor "):
            return self._set_events(line[len("monitor ") :])
        return refused(f"no command of RAS protocol 2: {printable(line)}")

    def _set_timeout(self, seconds: str) -> str:
        if not re.fullmatch("[0-9]{1,19}", seconds) or int(seconds) >= 1 << 63:
            return refused(f"a timeout is a whole number of seconds, not {printable(seconds)}")
        # 0 asks for no limit, but the gateway always has a limit.
        wait = min(float(seconds), LONGEST_WAIT) or LONGEST_WAIT
        self._question = replace(self._question, wait=wait)
        return _DONE

    def _set_events(self, groups: str) -> str:
        wanted: set[str] = set()
        for group in groups.split(","):
            if group.lower() == "all":
                wanted |= {LIFECYCLE, TRACE}
            elif group.lower() in (LIFECYCLE, TRACE):
                wanted.add(group.lower())
            else:
                return refused(f"events are lifecycle, trace or all, not {printable(group)}")
        self.events = frozenset(wanted)
        return _DONE


def refused(why: str) -> str:
    """Returns the line that refuses a command or question."""
    return f"ERROR: {why}\n"


def printable(text: str) -> str:
    r"""Returns the text with control characters as hexadecimal escapes.

    >>> printable("\x1b[2J")
    '\\x1b[2J'
    """
    return re.sub("[\x00-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)
