"""Groups of ranks on several hosts: network namespaces of this machine, joined by links."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from harness.network import Network
from harness.network import missing as no_network

from . import native
from .rounds import torch_team
from .team import Team

PLACEMENTS = {"2 x 2": (0, 0, 1, 1), "2 x 1": (0, 1), "3 + 1": (0, 0, 0, 1)}
"""The host of each rank."""
LINKS = (1, None)
"""Gigabits per second; None: as fast as this machine copies."""

SCATTERED = (0, 0, 1, 2)
"""The host of each rank where links are not perfect."""
IMPERFECT = {
    "50 ms each way": (50, 0, 0, 0),
    "1 % of packets lost": (0.1, 0.01, 0, 0),
    "5 % of packets 3 ms late": (0.1, 0, 0.05, 3),
}
"""Milliseconds of delay, the shares of packets lost and late, and how many milliseconds late."""

INTERRUPTS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


@contextmanager
def undisturbed() -> Iterator[None]:
    """Has an interrupt wait until what must not be left half done is done."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True)
class Site:
    """Where ranks are, and what joins their hosts."""

    placement: str
    hosts: tuple[int, ...]
    """The host of each rank."""
    gigabits: float | None

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.hosts)

    @property
    def count(self) -> int:
        """How many hosts there are."""
        return max(self.hosts) + 1

    @property
    def name(self) -> str:
        """Names it in tables."""
        link = "unshaped" if self.gigabits is None else f"{self.gigabits:g} Gbit/s"
        return f"{self.placement}, {link}"

    @contextmanager
    def joined(self) -> Iterator[Network]:
        """Makes the hosts, which are gone at the end."""
        made = Network(self.count, self.gigabits)

        def end() -> None:
            with undisturbed():
                made.__exit__(None, None, None)

        with ExitStack() as stack:
            with undisturbed():
                made.__enter__()
                stack.callback(end)
            yield made

    def team(self, network: Network, backends: Sequence[str]) -> Team:
        """Starts the ranks on their hosts."""
        return torch_team(self.ranks, backends, network, self.hosts)


@contextmanager
def joined_imperfectly(name: str) -> Iterator[Network]:
    """Makes hosts whose links are those of IMPERFECT; they are gone at the end."""
    numbers = [str(number) for number in (*IMPERFECT[name], 1)]
    made = Network(max(SCATTERED) + 1, switch=(str(native.program("switch")), *numbers))
    with ExitStack() as stack:
        with undisturbed():
            stack.enter_context(made)
        yield made


def missing() -> str:
    """Says why there can be no hosts; empty if there can."""
    with undisturbed():
        return str(no_network())


def sites(*, quick: bool) -> list[Site]:
    """Returns what is measured: one site, with links of no limit, if `quick`."""
    found = [
        Site(placement, hosts, gigabits)
        for placement, hosts in PLACEMENTS.items()
        for gigabits in LINKS
    ]
    return [site for site in found if site.gigabits is None][:1] if quick else found
