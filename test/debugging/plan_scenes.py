"""Plans the step of planned_step.py with each fault, in one process; prints the answers as JSON.

Each argument is a fault; one that begins with a plus sign has each rank run.
"""

import json
import sys
from pathlib import Path

from torchcomms_pg.plan import Job, plan
from torchcomms_pg.plan.report import as_dict

STEP = str(Path(__file__).with_name("planned_step.py"))


def show_answers(faults):
    answers = {}
    for argument in faults:
        fault = argument.removeprefix("+")
        job = Job((STEP, fault), 16, 8, beside=2)
        answers[fault] = as_dict(plan(job, each=fault != argument))
    print(json.dumps(answers))


if __name__ == "__main__":
    show_answers(sys.argv[1:])
