"""What is measured, and what came out."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

OPERATIONS = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "reduce",
    "gather",
    "scatter",
    "send_recv",
    "barrier",
)
MEETS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "barrier")
"""Those in which no rank can be a call ahead of another."""
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Contender:
    """One way to do one operation."""

    op: str
    bytes: int
    """Of the larger buffer of a rank: of all blocks together where there are blocks."""
    backend: str
    """``torchcomms``, ``gloo``, ``fake`` or ``mpi``."""
    ranks: int
    dtype: str = "float32"
    mode: str = "sync"
    frontend: str = "dist"
    network: str = ""
    """What joins the hosts of the ranks, such as "2 x 2, 1 Gbit/s"; empty: all are on one host."""

    @property
    def elements(self) -> int:
        """Elements of the larger buffer: a multiple of the ranks where it is cut in blocks."""
        count = max(1, self.bytes // ELEMENT_BYTES[self.dtype])
        if self.op in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
            return -(-count // self.ranks) * self.ranks
        return count

    @property
    def plain(self) -> bool:
        """Whether it is torchcomms as a user has it who asks for nothing else."""
        return self == Contender(self.op, self.bytes, "torchcomms", self.ranks)

    @property
    def where(self) -> str:
        """Says how many ranks there are, and on which hosts if not on one."""
        return self.network or f"{self.ranks} ranks"

    @property
    def key(self) -> str:
        """Names it in a JSON file and in messages."""
        what = f"{self.op} {self.bytes} B {self.dtype} {self.mode}"
        return f"{what}, {self.where}, {self.frontend} {self.backend}"


@dataclass
class Row:
    """The times of a contender, in microseconds; each call counts as its slowest rank."""

    contender: Contender
    median_us: float
    p99_us: float
    calls: int
    rounds_us: list[float] = field(default_factory=list)
    """The median of each round. Between the rounds the other contenders had theirs."""

    @property
    def gigabytes_per_second(self) -> float:
        """Bytes of the buffer over the median."""
        return self.contender.bytes / self.median_us / 1e3

    def as_json(self) -> dict[str, Any]:
        """Returns plain values, without the digits that are noise."""
        return {
            **asdict(self.contender),
            "median_us": round(self.median_us, 3),
            "p99_us": round(self.p99_us, 3),
            "calls": self.calls,
            "rounds_us": [round(value, 3) for value in self.rounds_us],
        }

    @staticmethod
    def from_json(values: dict[str, Any]) -> Row:
        """Reads what as_json wrote."""
        names = Contender.__dataclass_fields__
        contender = Contender(**{name: values[name] for name in names if name in values})
        return Row(
            contender,
            values["median_us"],
            values["p99_us"],
            values["calls"],
            list(values["rounds_us"]),
        )


def summarise(contender: Contender, rounds: list[list[list[float]]]) -> Row:
    """Makes a row of times in microseconds: by round, by rank, by call."""
    slowest = [[max(times) for times in zip(*ranks, strict=True)] for ranks in rounds]
    if contender.op == "send_recv":  # there and back
        slowest = [[value / 2 for value in values] for values in slowest]
    calls = sorted(value for values in slowest for value in values)
    return Row(
        contender,
        median(calls),
        calls[min(len(calls) - 1, int(len(calls) * 0.99))],
        len(calls),
        [median(values) for values in slowest],
    )


class Results:
    """Everything a run has measured."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.sections: dict[str, Any] = {}
        """Floor, library, steps, groups, hosts, ... by name: plain values."""
        self.failures: list[str] = []

    def find(self, op: str, bytes: int, backend: str, ranks: int, **also: str) -> Row | None:
        """Returns the row of this contender, if it was measured."""
        wanted = Contender(op, bytes, backend, ranks, **also)
        return next((row for row in reversed(self.rows) if row.contender == wanted), None)
