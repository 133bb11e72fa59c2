"""The fault matrix over watched backends of others: whom the verdicts name.

Rank 1 of 3 is at fault, as in fault_matrix.py, whose faults these are. The backend is left alone,
so that a cell ends when the ranks have said who holds them up, or have got on, or the backend has
ended the operation by itself. A cell is

- right: every rank that waits has printed a verdict that names what is at fault, or, where nothing
  is, none has;
- ended: the backend has raised, or ended the process, on a rank that is not at fault;
- goes on: the backend takes it as it is, and nobody waits;
- silent: there is no verdict, though ranks wait, or one that names nobody;
- wrong: a verdict accuses a rank that is not at fault.

    PYTHONPATH=.:test python -m failures.watched_matrix [PART OF A CELL'S NAME]     prints the table
"""

import datetime
import itertools
import os
import re
import sys
import time

import torch
import torch.distributed as dist

import torchcomms_pg
from failures.faults import CULPRIT, LIMIT, WORLD, Group, commit, operate_beside, serve
from harness import gpus, limits
from harness.ranks import Ranks, connect_store, meet, wait_for

APIS = {
    "gloo": ("gloo", False),
    "DDP over gloo": ("gloo", True),
    "nccl": ("nccl", False),
    "nccl-legacy": ("nccl-legacy", False),
}
DIFFERENT = r"its ranks call different operations"
ABSENT = r"rank 1 (has not arrived at|did not answer)"

# What a verdict says of each fault; None: there is to be no verdict.
SAID = {
    "never calls": r"rank 1 has not arrived at .*(\n.*)*in stays_away",
    "calls late": None,
    # The latter where the backend refuses its call alone.
    "another operation": f"{DIFFERENT}|{ABSENT}",
    "another size": f"{DIFFERENT}|{ABSENT}",
    "another dtype": f"{DIFFERENT}|{ABSENT}",
    "another root": DIFFERENT,
    "a root of its own": DIFFERENT,
    "another message": DIFFERENT,
    "another order of groups": r"deadlock: rank 0 waits in .* for rank 1, which waits in .* for "
    r"rank 0|deadlock: rank 1 waits in .* for rank [02], which waits in .* for rank 1",
    "raises in Python": ABSENT,
    "sys.exit": ABSENT,
    "kill -9": r"rank 1 did not answer.*(\n.*)*its process is dead",
    "SIGSTOP for a while": r"rank 1 did not answer.*(\n.*)*rank 1: its process is stopped",
    "no thread to spare": ABSENT,
    "no descriptor to spare": ABSENT,
    "holds the GIL": r"rank 1 has not arrived at .*(\n.*)*holds the GIL",
    "compiles long": None,
    "abort during an operation": ABSENT,
    "store server gone": r"it cannot be known what the other ranks do",
}
# These have no way to happen there.
IMPOSSIBLE = {
    *(
        (fault, "DDP over gloo")
        for fault in ("another root", "a root of its own", "another message")
    )
}


def backend_of(api):
    """The backend, and whether the operations are those of DDP. Others than APIS are backends."""
    return APIS.get(api, (api, False))


def on_gpus(api):
    return backend_of(api)[0].startswith("nccl")


CELLS = [
    cell
    for cell in itertools.product(SAID, APIS)
    if cell not in IMPOSSIBLE and (not on_gpus(cell[1]) or not gpus.missing())
]
SECONDS = LIMIT + 12  # until the ranks have their verdict
LINGER = 3  # seconds after the right one, in which a wrong one would be seen
PATIENCE = 60  # of the backend, in which several cells under way together are looked at


class WatchedGroup(Group):
    """Process groups of another backend, as the faults know them."""

    def __init__(self, api, store, name, patience):
        backend, self.ddp = backend_of(api)
        self.store, self.name, self.rank = store, name, int(os.environ["RANK"])
        self.is_process_group = True
        self.device = "cpu"
        if on_gpus(api):
            gpus.take_device(WORLD)
            self.device = "cuda"
        watch(api, 60)
        options = {"store": dist.PrefixStore(name, store), "rank": self.rank, "world_size": WORLD}
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=patience), **options)
        self.second = dist.new_group()
        if self.ddp:
            torch.manual_seed(1)
            self.model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 10))
        self.operate_in_second()
        self.operate()

    def all_reduce(self, tensor, async_op=False, group=None):
        tensor = tensor.to(self.device)
        work = dist.all_reduce(tensor, group=group, async_op=async_op)
        if self.device != "cpu" and not async_op:
            torch.cuda.synchronize()
        return work

    def _wait_for(self, work):
        work.wait()
        if self.device != "cpu":
            torch.cuda.synchronize()


def watch(api, seconds):
    if api != "torchcomms":
        torchcomms_pg.watch(timeout=datetime.timedelta(seconds=seconds))


def run(fault, api, args, server, patience):
    """Returns the error of this rank, if there was one.

    `patience`: the backend's own timeout in seconds, which is to be longer than the cell lasts.
    """
    store = connect_store(*args)
    group = WatchedGroup(api, connect_store(*server) if server else store, "tested", patience)
    meet(store, "made", WORLD)
    watch(api, LIMIT)
    if server:
        store.add("ready", 1)
        store.wait(["server gone"], datetime.timedelta(seconds=30))
    if group.rank != CULPRIT:
        store.wait(["it begins"], datetime.timedelta(seconds=30))
    try:
        if group.rank == CULPRIT:
            commit(fault, group, lambda: store.set("it begins", str(time.monotonic())))
        elif fault == "abort during an operation":
            store.add("in the operation", 1)
        operate_beside(fault, group)
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    if group.rank != CULPRIT and store.add("done", 1) == WORLD - 1:
        store.set("the others are done", "")
    return None


def accused(verdict):
    """The ranks that its first line holds responsible.

    Not those that have not answered, as on a machine that is too busy, and not those of which it
    says that they may wait elsewhere.
    """
    head = verdict.partition("ranks: ")[2].partition("\n")[0]
    if "and may wait elsewhere" in head:
        return set()
    found = re.findall(r"ranks? ([\d, ]+?)(?: \(global [\d, ]+\))? ha", head)
    return {int(rank) for ranks in found for rank in ranks.split(", ")}


class Cell:
    """One cell: begun, then looked at, so that several can be under way together."""

    def __init__(self, fault, api):
        self.fault, self.api = fault, api
        started_with = gpus.environment if on_gpus(api) else None
        self.ranks = Ranks(WORLD, init=False, started_with=started_with)
        self.args = Ranks.store_args()
        self.server, server = None, None
        if fault == "store server gone":
            self.server = Ranks(1, init=False)
            self.server.start(serve)
            server = (self.server.wait_report(0), "lost")
        self.ranks.start(run, fault, api, self.args, server, PATIENCE * limits.grown(1))
        if self.server:
            store = connect_store(*self.args)
            wait_for(lambda: store.add("ready", 0) == WORLD, 60)
            self.server.kill(0)
            store.set("server gone", "")

    def outcome(self):
        """(kind, what there is to say)."""
        others = [rank for rank in range(WORLD) if rank != CULPRIT]
        try:
            store = connect_store(*self.args)
            store.wait(["it begins"], datetime.timedelta(seconds=limits.grown(60)))
            lasts = time.monotonic() - float(store.get("it begins"))  # beside other cells
            left = max(SECONDS - lasts / limits.grown(1), 1)
            if SAID[self.fault] is not None and wait_for(lambda: self.settled(others), left):
                left = LINGER
            outcomes = self.ranks.wait(left, others, grace=1e9)
            said = {rank: self.ranks.verdicts(rank) for rank in range(WORLD)}
        finally:
            self.ranks.busy = True
            self.ranks.close()
            if self.server:
                self.server.close()
        return judge(self.fault, [outcomes[i] for i in range(len(others))], said, others)

    def settled(self, others):
        """Whether each rank has ended, or has said what is at fault.

        Where the backend has ended the operation of one, the others need not know what is at fault.
        """
        outcomes = [self.ranks.outcome(rank) for rank in others]
        ended = any(outcome and (outcome.died or outcome.value) for outcome in outcomes)
        wanted = "" if ended else SAID[self.fault]
        return all(
            outcome or any(re.search(wanted, verdict) for verdict in self.ranks.verdicts(rank))
            for rank, outcome in zip(others, outcomes, strict=True)
        )


def judge(fault, outcomes, said, others):
    every = [verdict for rank in said for verdict in said[rank]]
    # The backend has taken these out of their operations: others wait for them in the next.
    ended = {rank: o for rank, o in zip(others, outcomes) if o.died or o.value}
    for verdict in every:
        if SAID[fault] is None or accused(verdict) - {CULPRIT, *ended}:
            return "wrong", verdict
    if ended:
        outcome = next(iter(ended.values()))
        return "ended", str(outcome.value or outcome.died)[-300:]
    waiting = [rank for rank, outcome in zip(others, outcomes) if outcome.hung or said[rank]]
    if not waiting:
        return ("right" if SAID[fault] is None else "goes on"), ""
    silent = [rank for rank in waiting if not any(re.search(SAID[fault], v) for v in said[rank])]
    return ("silent", "\n".join(every)) if silent else ("right", "")


def run_matrix(cells=tuple(CELLS), together=2):
    """Yields each cell with its outcome, in order."""
    waiting = []
    for cell in [*cells, *[None] * together]:
        if len(waiting) == together or (cell is None and waiting):
            name, under_way = waiting.pop(0)
            yield name, under_way.outcome()
        if cell is not None:
            waiting.append((cell, Cell(*cell)))


def table(results):
    lines = ["| fault | " + " | ".join(APIS) + " |", "|---" * (len(APIS) + 1) + "|"]
    for fault in SAID:
        marks = [results.get((fault, api), ("-",))[0] for api in APIS]
        lines.append(f"| {fault} | " + " | ".join(marks) + " |")
    return "\n".join(lines)


def score(results):
    """(right, of so many cells that are the watch's, wrong)."""
    kinds = [kind for kind, _ in results.values()]
    judged = [kind for kind in kinds if kind not in ("ended", "goes on")]
    return judged.count("right"), len(judged), judged.count("wrong")


def main():
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    results = {}
    for cell, (kind, what) in run_matrix([cell for cell in CELLS if part in " / ".join(cell)]):
        results[cell] = kind, what
        print(f"{' / '.join(cell)}: {kind} {what if kind != 'right' else ''}", flush=True)
    print(table(results))
    right, counted, wrong = score(results)
    print(f"{len(results)} cells; right in {right} of {counted}, wrong in {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    from failures import watched_matrix
    from harness import ranks

    try:
        status = watched_matrix.main()
    finally:
        ranks.close_all()
    sys.exit(status)
