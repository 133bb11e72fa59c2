"""Answers for all ranks of a large job what they call, from some ranks on one machine.

``python -m torchcomms_pg.plan --world-size 4096 train.py ARGS`` runs the program for the ranks that
differ, over groups that move nothing, and judges the calls of all ranks. docs/plan.md describes it.
"""

from __future__ import annotations

from torchcomms_pg.plan.answer import Answer, plan
from torchcomms_pg.plan.runners import Job, PlanError

__all__ = ["Answer", "Job", "PlanError", "plan"]
