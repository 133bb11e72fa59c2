"""Contenders side by side: they take turns, so that what slows the machine slows all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from harness.ranks import RankFailure

from . import mpi
from .rank import TorchRank
from .results import Contender, Results, Row, summarise
from .team import Team

ROUNDS = 5
MOST_CALLS = 2000


def torch_team(
    ranks: int, backends: Iterable[str], network: Any = None, hosts: Sequence[int] = ()
) -> Team:
    """Starts ranks with a group of each backend; with none they have no default group either.

    `hosts` has the host of each rank where they are on several.
    """
    team = Team(ranks, TorchRank, ranks, network, hosts)
    address = network.address(hosts[0]) if network else "127.0.0.1"
    port = max(team.call("serve_store", address))
    team.call("join", address, port, tuple(backends))
    return team


def on_this_host(ranks: int) -> Team:
    """Starts ranks of torch that can run any contender but MPI's."""
    return torch_team(ranks, ("torchcomms", "gloo", "fake"))


class Arena:
    """The processes that measure: for one number of ranks at a time, started when needed.

    `start` starts so many ranks of torch.
    """

    def __init__(
        self,
        results: Results,
        say: Callable[[str], None],
        seconds: float,
        start: Callable[[int], Team] = on_this_host,
    ) -> None:
        self.results, self.say, self.seconds = results, say, seconds
        self._start = start
        self._teams: dict[tuple[str, int], Team] = {}
        self._broken: dict[tuple[str, int], int] = {}

    def torch(self, ranks: int) -> Team:
        """Returns ranks that have a group of every backend."""
        return self._team("torch", ranks, lambda: self._start(ranks))

    def _team(self, kind: str, ranks: int, start: Callable[[], Team]) -> Team:
        team = self._teams.get((kind, ranks))
        if team is None or team.closed:
            if self._broken.get((kind, ranks), 0) >= 5:
                raise RankFailure("given up after five failures")
            for other in [key for key in self._teams if key[1] != ranks]:
                self._teams.pop(other).close()
            try:
                team = self._teams[kind, ranks] = start()
            except RankFailure:
                self.broke(kind, ranks)
                raise
        return team

    def broke(self, kind: str, ranks: int) -> None:
        """Counts a failure of a team."""
        self._broken[kind, ranks] = self._broken.get((kind, ranks), 0) + 1

    def of(self, contender: Contender) -> Team:
        """Returns the ranks that can run this contender."""
        if contender.backend == "mpi":
            return self._team("mpi", contender.ranks, lambda: mpi.MpiTeam(contender.ranks))
        return self.torch(contender.ranks)

    def compare(self, contenders: Sequence[Contender]) -> list[Row]:
        """Measures these in turns. One that fails is noted and left out."""
        calls: dict[Contender, int] = {}
        for contender in contenders:
            try:
                slowest = max(self.of(contender).call("prepare", contender))
            except RankFailure as error:
                self._failed(contender, error)
                # Its team is gone, and with it what was prepared in it before.
                others = [other for other in contenders if other != contender]
                return self.compare(others) if others else []
            share = self.seconds * 1e6 / ROUNDS
            calls[contender] = int(min(MOST_CALLS / ROUNDS, max(1, share / max(slowest, 0.1))))
        times: dict[Contender, list[list[list[float]]]] = {c: [] for c in calls}
        for turn in range(ROUNDS):
            order = list(times)
            for contender in order[turn % len(order) :] + order[: turn % len(order)]:
                try:
                    team = self.of(contender)
                    times[contender].append(team.call("measure", contender, calls[contender]))
                except RankFailure as error:
                    self._failed(contender, error)
                    others = [other for other in contenders if other != contender]
                    return self.compare(others) if others else []
        for key, team in self._teams.items():
            if team.closed:
                continue
            try:
                team.call("forget")
            except RankFailure:
                self.broke(*key)
        rows = [summarise(contender, rounds) for contender, rounds in times.items()]
        self.results.rows += rows
        return rows

    def _failed(self, contender: Contender, error: RankFailure) -> None:
        self.broke("mpi" if contender.backend == "mpi" else "torch", contender.ranks)
        self.results.failures.append(f"{contender.key}: {error}")
        self.say(f"failed: {contender.key}\n{error}")

    def close(self) -> None:
        """Ends every process."""
        for team in self._teams.values():
            team.close()
        self._teams.clear()
