"""Groups of ranks on several hosts: network namespaces of this machine, joined by links."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from harness.network import Network
from harness.network import missing as no_network

from . import bounds
from .plan import MB
from .results import Contender
from .rounds import ROUNDS, torch_team
from .team import Team

PLACEMENTS: dict[int, dict[str, tuple[int, ...]]] = {
    2: {"2 x 2": (0, 0, 1, 1), "2 x 1": (0, 1), "3 + 1": (0, 0, 0, 1)},
    3: {"3 x 2": (0, 0, 1, 1, 2, 2)},
}
"""The host of each rank, by the number of hosts."""
LINKS = (1, None)
"""Gigabits per second; None: as fast as this machine copies."""

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
    def joined(self, mtu: int = 1500) -> Iterator[Network]:
        """Makes the hosts, which are gone at the end."""
        made = Network(self.count, self.gigabits, mtu=mtu)

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


def missing() -> str:
    """Says why there can be no hosts; empty if there can."""
    with undisturbed():
        return str(no_network())


def sites(count: int, *, quick: bool) -> list[Site]:
    """Returns what is measured on so many hosts: one thing, on links of no limit, if `quick`."""
    found = [
        Site(placement, hosts, gigabits)
        for placement, hosts in PLACEMENTS[count].items()
        for gigabits in LINKS
    ]
    return [site for site in found if site.gigabits is None][:1] if quick else found


def sent(site: Site, sizes: Sequence[int], backends: Sequence[str]) -> list[dict[str, Any]]:
    """Counts the bytes that each host sends for an all-reduce."""
    records = []
    # Large frames: headers are not what is counted.
    with site.joined(mtu=60_000) as network, site.team(network, backends) as team:
        for bytes_ in sizes:
            for backend in backends:
                contender = Contender("all_reduce", bytes_, backend, site.ranks, network=site.name)
                record = {
                    "placement": site.placement,
                    "backend": backend,
                    "bytes": bytes_,
                    "sent": counted(contender, team, network),
                    "bound": bounds.wire(bytes_, site.count),
                }
                records.append(record)
    return records


def counted(contender: Contender, team: Team, network: Network) -> list[float]:
    """Returns the bytes that each host sends for a call: the median of some rounds."""
    team.call("prepare", contender)
    calls = max(1, 4 * MB // contender.bytes)  # beside which it is nothing that ranks meet
    counters = [[network.sent(host) for host in range(network.hosts)]]
    for _ in range(ROUNDS):  # TCP may send something again in one of them
        team.call("measure", contender, calls)
        counters.append([network.sent(host) for host in range(network.hosts)])
    team.call("forget")
    return [
        median((now - then) / calls for then, now in pairwise(of_host))
        for of_host in zip(*counters, strict=True)
    ]
