"""The operations of one step of the training, on each rank."""

from __future__ import annotations

from dataclasses import dataclass

from torchcomms_pg.plan.answer import Answer
from torchcomms_pg.plan.program import Program
from torchcomms_pg.plan.ranges import as_ranges
from torchcomms_pg.trace.dumps import Entry


@dataclass
class Step:
    """One step of a job.

    ``number`` counts from 1; it and ``count``, the number of steps that each rank makes, are 0 if
    the program steps no optimizer: the step then is the whole program. ``programs`` and ``entries``
    have, by rank, the program that answers for the rank, and the rank's operations of the step.
    """

    number: int
    count: int
    programs: dict[int, Program]
    entries: dict[int, list[Entry]]

    def __str__(self) -> str:
        if not self.count:
            return "the whole program, which steps no optimizer"
        return f"step {self.number} of {self.count}"


def step_of(answer: Answer, number: int | None = None) -> Step:
    """Returns a step of the ranks that the answer is for.

    A step begins where the step before it has ended; the first one has all that is called before
    it, and what is called after the last step is in none.

    Args:
        answer: the answer.
        number: the step, from 1 on; the last that each rank makes if it is None.

    Raises:
        ValueError: a rank makes fewer steps.
    """
    programs: dict[int, Program] = {}
    for ranks in answer.roles.ranks.values():
        first = answer.programs[ranks[0]]
        programs.update({rank: answer.programs.get(rank, first) for rank in ranks})
    count = min(len(program.steps) for program in programs.values())
    if number is not None and not 1 <= number <= count:
        few = as_ranges(rank for rank, program in programs.items() if len(program.steps) == count)
        raise ValueError(
            f"the step is {number}, wanted one of 1 to {count}: {few} of the program make "
            f"{count or 'no'} step{'' if count == 1 else 's'} of an optimizer"
            if count
            else f"the step is {number}, but {few} step no optimizer; leave the step out for all "
            "that the program calls"
        )
    number = number or count
    entries = {}
    for rank, program in programs.items():
        begin, end = 0, len(program.calls)
        if number:
            begin, end = (0, *program.steps)[number - 1], program.steps[number - 1]
        entries[rank] = [
            entry for entry in answer.dumps[rank].entries if begin <= entry.record < end
        ]
    return Step(number, count, programs, entries)
