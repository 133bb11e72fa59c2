"""Plans the step of planned_step.py with each fault, in one process; prints the answers as JSON.

Each argument is a fault; one that begins with a plus sign has each rank run. With --calls and a
program, prints what each of its 8 ranks calls.
"""

import json
import sys
from pathlib import Path

from torchcomms_pg.plan import Job, plan
from torchcomms_pg.plan.report import as_dict

STEP = str(Path(__file__).with_name("planned_step.py"))


def calls_of(dump):
    """Returns what a rank called, as values of JSON; without the sizes of objects' bytes."""
    found = []
    for entry in dump.entries:
        sizes = [entry.numel_in, entry.numel_out] if entry.dtype != "Byte" else None
        sides = [entry.sender, entry.receiver, entry.tag, bool(entry.batch)] if entry.p2p else None
        # torch's versions gather the sizes of objects by the one or the other operation.
        op = entry.op.removeprefix("_").removesuffix("_base")
        what = [op, list(entry.group.ranks), sizes, entry.dtype, entry.root, entry.reduce_op]
        found.append([*what, sides, str(entry.where)])
    return found


def show_calls(program):
    answer = plan(Job((program,), 8, 8, beside=2), each=True)
    assert not answer.failed, answer.failed
    print(json.dumps([calls_of(answer.dumps[rank]) for rank in range(8)]))


def show_answers(faults):
    answers = {}
    for argument in faults:
        fault = argument.removeprefix("+")
        job = Job((STEP, fault), 16, 8, beside=2)
        answers[fault] = as_dict(plan(job, each=fault != argument))
    print(json.dumps(answers))


if __name__ == "__main__":
    if sys.argv[1] == "--calls":
        show_calls(sys.argv[2])
    else:
        show_answers(sys.argv[1:])
