"""Serves clients of NCCL's RAS on a socket that listens; asks for the status in another thread."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from torchcomms_pg.status.jobs import NoAnswerError, StatusError
from torchcomms_pg.status.ras.dialogue import LONGEST_LINE, Dialogue, Question, refused
from torchcomms_pg.status.ras.events import Peer, Peers, peers_of, text_of
from torchcomms_pg.status.ras.formats import as_json, as_text

# Limits of clients, which may belong to any user of this host, and may be people who type; of the
# seconds that a client may take to ask and to read.
MOST_CLIENTS = 16
_ASKING = 30.0
_READING = 5.0

# Seconds between looks at the job's processes while a client monitors them.
_LOOK = 2.0

_TIDY = 0.5  # seconds between checks whether a client is too slow
_SCARCE = 0.2  # seconds without accepting after descriptors have run out

# Returns the status of the job, in the form of docs/status.md. Takes the seconds to wait for
# processes that do not answer; raises StatusError or NoAnswerError.
Ask = Callable[[float], dict[str, Any]]


class _Phase(Enum):
    ASKS = auto()
    WAITS = auto()
    READS = auto()


@dataclass(eq=False)
class _Client:
    """A client, from its connection to the end of its answer.

    Attributes:
        until: limit of the wait for the client, on the clock of time.monotonic().
        unsent: the part of the answers that is not sent.
        answer: the answer to the client's question, once it has asked.
    """

    socket: socket.socket
    until: float
    dialogue: Dialogue = field(default_factory=Dialogue)
    phase: _Phase = _Phase.ASKS
    unsent: bytearray = field(default_factory=bytearray)
    answer: Future[str] | None = None

    def monitors(self) -> bool:
        return self.phase is _Phase.ASKS and bool(self.dialogue.events)

    def wanted(self) -> int:
        """Returns the events of poll() that the client waits for."""
        events = 0
        if self.phase is _Phase.ASKS and len(self.unsent) < LONGEST_LINE:
            events |= select.POLLIN
        if self.phase is not _Phase.WAITS and self.unsent:
            events |= select.POLLOUT
        return events

    def say(self, text: str, now: float) -> None:
        """Appends to what the client will get. One that monitors has a limit to read it."""
        if text and not self.unsent and self.dialogue.events:
            self.until = now + _READING
        self.unsent += text.encode(errors="replace")

    def send(self) -> None:
        """Sends as much as the connection accepts; raises OSError if it has failed."""
        with contextlib.suppress(BlockingIOError):
            del self.unsent[: self.socket.send(self.unsent)]

    def close(self) -> None:
        # Reads what the client has sent: closing a connection with unread input would discard the
        # answer that the client has not read yet.
        with self.socket, contextlib.suppress(OSError):
            for _ in range(16):
                if not self.socket.recv(LONGEST_LINE):
                    break


class Server:
    """Serves clients on a socket. Limits their number, and each client's bytes and time.

    Args:
        listening: the socket, which the server closes at its end.
        ask: returns the status. Only one thread calls it at a time.

    Raises:
        RuntimeError: no thread can be started.
    """

    def __init__(self, listening: socket.socket, ask: Ask) -> None:
        listening.setblocking(False)
        self._listening = listening
        self._ask = ask
        self._asking = ThreadPoolExecutor(1, "ras")
        self._asking.submit(int)  # starts the thread, so that no question has to
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._clients: list[_Client] = []
        self._accepts_from = 0.0
        self._peers: Peers | None = None  # set while a client monitors
        self._look: Future[list[Peer]] | None = None
        self._looks_from = 0.0

    def step(self, patience: float) -> None:
        """Serves what clients have sent; waits at most `patience` seconds for them."""
        polled = select.poll()
        polled.register(self._woken, select.POLLIN)
        if len(self._clients) < MOST_CLIENTS and time.monotonic() >= self._accepts_from:
            polled.register(self._listening, select.POLLIN)
        for client in self._clients:
            # A client that waits is served when its answer is there, even if it has left.
            if client.phase is not _Phase.WAITS:
                polled.register(client.socket, client.wanted())
        if self._clients:
            patience = min(patience, _TIDY)
        found = dict(polled.poll(patience * 1000))
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(1024)
        self._watch()
        for client in list(self._clients):
            try:
                keeps = self._advance(client, found.get(client.socket.fileno(), 0))
            except OSError:
                keeps = False
            if not keeps:
                self._clients.remove(client)
                client.close()
        if self._listening.fileno() in found:
            self._accept()

    def close(self) -> None:
        """Ends all connections."""
        self._asking.shutdown(wait=False, cancel_futures=True)
        self._listening.close()
        for client in self._clients:
            client.close()
        self._clients.clear()

    def _accept(self) -> None:
        try:
            made, _ = self._listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # no descriptor is free
            self._accepts_from = time.monotonic() + _SCARCE
            return
        made.setblocking(False)
        self._clients.append(_Client(made, time.monotonic() + _ASKING))

    def _advance(self, client: _Client, events: int) -> bool:
        """Serves a client; returns False if it is done, or its time is over."""
        now = time.monotonic()
        if client.answer is not None and client.phase is _Phase.WAITS:
            if client.answer.done():
                client.unsent += client.answer.result().encode(errors="replace")
                client.phase = _Phase.READS
                client.until = now + _READING
            return True
        if events & (select.POLLERR | select.POLLNVAL):
            return False
        if client.phase is _Phase.READS:
            if events:
                client.send()
                return bool(client.unsent)
            return now < client.until
        if events & (select.POLLIN | select.POLLHUP):
            received = client.socket.recv(LONGEST_LINE)
            answers = client.dialogue.hear(received) if received else None
            if answers is None:
                return False
            client.say(answers, now)
        if client.unsent:
            client.send()
        if client.dialogue.asked is not None:
            client.phase = _Phase.WAITS
            client.answer = self._asking.submit(self._answer, client.dialogue.asked)
            client.answer.add_done_callback(self._notify)
        elif client.monitors() and not client.unsent:
            client.until = math.inf
            if self._peers is None:
                self._notify(None)  # starts the first look soon
        return now < client.until

    def _answer(self, question: Question) -> str:
        try:
            status = self._ask(question.wait)
            return (
                as_json(status) if question.as_json else as_text(status, verbose=question.verbose)
            )
        except (StatusError, NoAnswerError, OSError) as error:
            return refused(str(error))

    def _notify(self, _: object) -> None:
        with contextlib.suppress(OSError):  # it is full, or the server has ended
            self._wake.send(b"x")

    def _watch(self) -> None:
        """Gives clients that monitor the new events, and starts the next look at processes."""
        now = time.monotonic()
        seen: list[Peer] = []
        if self._look is not None and self._look.done():
            seen, self._look = self._look.result(), None
        if not any(client.monitors() for client in self._clients):
            self._peers = None
            return
        if self._peers is None:
            self._peers = Peers()
        elif seen:
            for event in self._peers.notice(seen):
                for client in self._clients:
                    if client.monitors() and event.group in client.dialogue.events:
                        client.say(text_of(event, as_json=client.dialogue.as_json), now)
        waits = any(client.phase is _Phase.WAITS for client in self._clients)
        if now >= self._looks_from and self._look is None and not waits:
            self._looks_from = now + _LOOK
            self._look = self._asking.submit(self._find_peers)
            self._look.add_done_callback(self._notify)

    def _find_peers(self) -> list[Peer]:
        try:
            return peers_of(self._ask(Question().wait))
        except (StatusError, NoAnswerError, OSError):
            return []  # the next look tries again
