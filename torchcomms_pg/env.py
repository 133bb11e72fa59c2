"""Every environment variable that torchcomms_pg reads; ``python -m torchcomms_pg.env`` lists them.

Nothing else in the package reads the environment. A variable is read when it is needed, so that
changing it takes effect for communicators created afterwards.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: of the variable.
        default: what holds where it is not set, in words.
        meaning: one line.
    """

    name: str
    default: str
    meaning: str


VARIABLES = (
    Variable("TORCHCOMM_TIMEOUT_SECONDS", "600", "how long an operation of new_comm may take"),
    Variable(
        "TORCHCOMM_ABORT_ON_ERROR",
        "true",
        "whether a timeout or error of a communicator of new_comm ends the process",
    ),
    Variable("TORCHCOMM_RANK", "none", "rank of this process; before every launcher's variable"),
    Variable("TORCHCOMM_SIZE", "none", "number of ranks; goes with TORCHCOMM_RANK"),
    Variable("OMPI_COMM_WORLD_RANK", "none", "rank of this process, set by Open MPI's mpirun"),
    Variable("OMPI_COMM_WORLD_SIZE", "none", "number of ranks, set by Open MPI's mpirun"),
    Variable("PMI_RANK", "none", "rank of this process, set by MPICH's and Intel's mpirun, Slurm"),
    Variable("PMI_SIZE", "none", "number of ranks, set by MPICH's and Intel's mpirun, Slurm"),
    Variable("PALS_RANKID", "none", "rank of this process, set by HPE's PALS"),
    Variable("PALS_SIZE", "none", "number of ranks, for PALS"),
    Variable("RANK", "none", "rank of this process, set by torchrun"),
    Variable("WORLD_SIZE", "none", "number of ranks, set by torchrun"),
    Variable("MASTER_ADDR", "none", "host of the store where ranks meet, set by torchrun"),
    Variable("MASTER_PORT", "none", "its port, set by torchrun"),
)

# Rank and number of ranks by launcher, the first that is set wins.
LAUNCHERS = (
    ("TORCHCOMM_RANK", "TORCHCOMM_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PALS_RANKID", "PALS_SIZE"),
    ("RANK", "WORLD_SIZE"),
)

_KNOWN = {variable.name for variable in VARIABLES}
_TRUE = {"1", "true", "yes", "on", "y", "t"}
_FALSE = {"0", "false", "no", "off", "n", "f"}


def read(name: str) -> str | None:
    """Returns the value of a variable of `VARIABLES`; None where it is unset or empty."""
    if name not in _KNOWN:
        raise KeyError(f"{name} is not among torchcomms_pg.env.VARIABLES")
    return os.environ.get(name) or None


def read_int(name: str) -> int | None:
    """As `read`, for a whole number of 0 or more.

    Raises:
        ValueError: it is something else.
    """
    value = read(name)
    if value is None:
        return None
    if not value.strip().isdecimal():
        raise ValueError(f"{name}={value!r}: wanted a whole number, 0 or more")
    return int(value)


def default_timeout() -> timedelta:
    """Returns what TORCHCOMM_TIMEOUT_SECONDS says, 600 s where it is not set.

    Raises:
        ValueError: it is not a positive number.
    """
    value = read("TORCHCOMM_TIMEOUT_SECONDS")
    if value is None:
        return timedelta(seconds=600)
    try:
        timeout = timedelta(seconds=float(value))
    except (ValueError, OverflowError):
        timeout = timedelta(0)
    if timeout < timedelta(milliseconds=1):
        raise ValueError(
            f"TORCHCOMM_TIMEOUT_SECONDS={value!r}: wanted a positive number of seconds"
        )
    return timeout


def abort_on_error() -> bool:
    """Returns what TORCHCOMM_ABORT_ON_ERROR says, True where it is not set.

    Raises:
        ValueError: it is neither true nor false.
    """
    value = read("TORCHCOMM_ABORT_ON_ERROR")
    if value is None:
        return True
    word = value.strip().lower()
    if word not in _TRUE | _FALSE:
        raise ValueError(f"TORCHCOMM_ABORT_ON_ERROR={value!r}: wanted true or false")
    return word in _TRUE


def launcher_ranks() -> tuple[int, int] | None:
    """Returns rank and number of ranks as a launcher states them; None where none does.

    Raises:
        ValueError: one of a launcher's two variables is missing, or they contradict each other.
    """
    for rank_name, size_name in LAUNCHERS:
        rank, size = read_int(rank_name), read_int(size_name)
        if rank is None and size is None:
            continue
        if rank is None or size is None:
            there, missing = (size_name, rank_name) if rank is None else (rank_name, size_name)
            raise ValueError(f"{there} is set and {missing} is not: set both, or neither")
        if rank >= size:
            raise ValueError(
                f"{rank_name}={rank} and {size_name}={size}: wanted a rank of 0 to {size - 1}"
            )
        return rank, size
    return None


def main() -> None:
    """Prints every variable with its value or default."""
    for variable in VARIABLES:
        value = os.environ.get(variable.name)
        now = f"(default: {variable.default})" if value is None else f"= {value}"
        print(f"{variable.name} {now}\n    {variable.meaning}")


if __name__ == "__main__":
    main()
