"""Events of a job's processes, for clients that monitor the job with NCCL's RAS."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from torchcomms_pg.status.ras.dialogue import LIFECYCLE, TRACE
from torchcomms_pg.status.ras.formats import now


class Peer(NamedTuple):
    """A process of the job, as one look at the job found it.

    Attributes:
        host: name of its host.
        pid: its process id in its own namespace.
        state: "answers", "stopped", "dead" or "silent".
        text: what is known of the process if it does not answer.
    """

    host: str
    pid: int
    state: str
    text: str


class Event(NamedTuple):
    """What has happened to a process.

    Attributes:
        group: of the event, "lifecycle" or "trace".
        name: NCCL's name of the event.
        peer: the process.
    """

    group: str
    name: str
    peer: Peer


def peers_of(status: dict[str, Any]) -> list[Peer]:
    """Returns the processes of a job whose status has the form of docs/status.md."""
    peers = {  # ranks may be threads of one process
        (rank["host"], rank["pid"]): Peer(
            rank["host"], rank["pid"], rank["state"], rank.get("text", "")
        )
        for rank in status["ranks"]
        if rank["state"] != "unknown"
    }
    return list(peers.values())


def text_of(event: Event, *, as_json: bool) -> str:
    """Returns the event as one line, with its newline."""
    peer = event.peer
    if not as_json:
        about = f": {peer.text}" if peer.text else ""
        return f"[{now()}] {event.name}: Process {peer.pid} on node {peer.host}{about}\n"
    about_peer = {"host": peer.host, "pid": peer.pid, "cuda_devs": [], "nvml_devs": []}
    line = {
        "timestamp": now(),
        "group": event.group.upper(),
        "event": event.name,
        "peer": about_peer,
        "details": peer.text,
    }
    return json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n"


class Peers:
    """The processes of the job, as the last look found them."""

    def __init__(self) -> None:
        self._states: dict[tuple[str, int], str] = {}
        self._looked = False

    def notice(self, peers: Iterable[Peer]) -> list[Event]:
        """Returns the events since the last call, or none at the first call.

        A process that is no longer among `peers` causes no event: it has ended normally, or its
        host has not answered.
        """
        events = []
        for peer in peers:
            before = self._states.get(peer[:2])
            self._states[peer[:2]] = peer.state
            if before == peer.state:
                continue
            if peer.state == "dead":
                events.append(Event(LIFECYCLE, "PEER_DEAD", peer))
            elif peer.state != "answers":
                if before in (None, "answers"):
                    events.append(Event(TRACE, "PEER_UNRESPONSIVE", peer))
            elif before in (None, "dead"):  # the pid of a dead process may have been reused
                events.append(Event(LIFECYCLE, "PEER_NEW", peer))
            else:
                events.append(Event(TRACE, "PEER_RECOVERED", peer))
        first, self._looked = not self._looked, True
        return [] if first else events
