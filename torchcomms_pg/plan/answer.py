"""The answer for all ranks: what is found, what is not seen, how much is moved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from torchcomms_pg.plan.expand import Expansion
from torchcomms_pg.plan.made_groups import disagreeing, off_mesh
from torchcomms_pg.plan.missing import find_missing
from torchcomms_pg.plan.program import Memory, Program
from torchcomms_pg.plan.ranges import as_ranges
from torchcomms_pg.plan.roles import Roles, find_roles
from torchcomms_pg.plan.runners import Job, Runners
from torchcomms_pg.trace.dumps import Dumps
from torchcomms_pg.trace.hazards import Hazards, nccl_hazards


@dataclass
class Answer:
    """What is known of all ranks of a job.

    Attributes:
        job: the job.
        roles: the ranks of each role, and notes on what was run.
        programs: what the ranks that were run have called, by rank.
        dumps: the calls of all ranks.
        hazards: what would hang, be refused or give other data, and what could not be judged.
        failed: the error and the ranks of each way in which ranks that were run have failed.
        code: the exit code of the first of them, 0 if none has failed.
    """

    job: Job
    roles: Roles
    programs: dict[int, Program]
    dumps: Dumps
    hazards: Hazards
    failed: dict[str, list[int]] = field(default_factory=dict)
    code: int = 0

    @property
    def exit_code(self) -> int:
        """The program's own code unless it is 0, 2 if nothing was called, 1 with a hazard."""
        if self.code:
            return self.code
        if not any(program.calls for program in self.programs.values()):
            return 2
        return int(bool(self.hazards.found))

    def memory(self) -> dict[str, Memory]:
        """Returns the memory of the ranks, by ranks as ranges; the largest first."""
        of: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for ranks in self.roles.ranks.values():
            memory = self.programs[ranks[0]].memory
            of[memory.parameters, memory.gradients, memory.states] += ranks
        return {as_ranges(of[key]): Memory(*key) for key in sorted(of, key=sum, reverse=True)}


def plan(job: Job, ranks: Iterable[int] | None = None, *, each: bool = False) -> Answer:
    """Runs the ranks of a job that differ, and returns the answer for all.

    Args:
        job: the program and the number of ranks.
        ranks: the ranks to answer for, global ranks; None for all.
        each: whether each of these ranks is run.

    Raises:
        PlanError: a rank took longer than the limit, or its process ended without a word.
        ValueError: a rank is not one of the job.
    """
    wanted = list(range(job.size)) if ranks is None else sorted(set(ranks))
    if not wanted or wanted[0] < 0 or wanted[-1] >= job.size:
        raise ValueError(f"ranks are {wanted[:8]}, wanted some of 0 to {job.size - 1}")
    runners = Runners(job)
    roles = find_roles(runners, wanted, each=each)
    programs = runners.programs
    failed: dict[str, list[int]] = defaultdict(list)
    for program in programs.values():
        if program.code or program.error:
            failed[program.error or f"exit code {program.code}"].append(program.rank)
    code = next((program.code for program in programs.values() if program.code), 0)
    dumps = Expansion(roles, programs).dumps()
    hazards = _judge(dumps, programs, job, len(wanted))
    return Answer(job, roles, programs, dumps, hazards, dict(failed), code)


def _judge(dumps: Dumps, programs: dict[int, Program], job: Job, judged: int) -> Hazards:
    groups, disputed = disagreeing(programs)
    missing = find_missing(dumps, disputed)
    if missing.first:
        for dump in dumps.values():
            dump.entries = [entry for entry in dump.entries if missing.judged(entry)]
    hazards = nccl_hazards(dumps)
    mesh = off_mesh(programs[min(programs)])
    found = [*groups, *mesh, *missing.hazards, *hazards.found]
    left = [
        f"operations of group {group.name} from #{number} on, where ranks are missing"
        for group, number in missing.first.items()
    ]
    unseen: dict[str, list[int]] = defaultdict(list)
    for program in programs.values():
        for line in program.unseen:
            unseen[line].append(program.rank)
    left += [f"{line} ({as_ranges(ranks)} of those run)" for line, ranks in unseen.items()]
    if len(programs) < judged:
        left.append(
            f"what is particular to one of the {judged - len(programs)} ranks that were not run; "
            "--ranks all runs each"
        )
    kept = [line for line in hazards.not_covered if "all were on the CPU" not in line]
    return replace(hazards, found=found, not_covered=left[:_MOST_LINES] + kept)


_MOST_LINES = 40  # most lines on what was not seen
