"""The fault matrix: what every rank gets when one of them fails, in each way it can.

Rank 1 of 3 is at fault, between two operations of a group that has worked before. Each cell has
processes of its own and says what is wrong with it; nothing means that it is as promised:

- all ends within the deadline and SLACK seconds,
- every rank that waits raises CommError, or ends with exit code 1 where errors end the process,
- the error names the rank at fault, and its verdict says what that rank does,
- flight recorders are dumped (of process groups, which are recorded without being asked),
- where errors are raised, a new group of the ranks that are left works afterwards, and once that
  is destroyed too, no thread of the library's is left on any rank, and no descriptor or mapping
  beyond those of before the first group (but where the store's server is gone: torch's store
  does not let go of a thread of the library's before its own timeout),
- no process that a rank has started outlives the cell, and nothing of it is left in /dev/shm.

On an accelerator, a simulated one here, the host does not wait for operations, so that their
errors cannot come from them. There the promise is: within the same time the streams are released,
so that a host that synchronizes with its device goes on, and then `Work.wait` raises what the
others raise, as the next call does. The result of what has failed is undefined. That holds of a
process group's operations, and under DDP of the first operation after a backward pass: backward()
itself returns, since it only queues.

    tools/fault_matrix [PART OF A CELL'S NAME]     prints the table
"""

import contextlib
import itertools
import os
import pathlib
import re
import sys
import tempfile
import time

from failures.faults import ABSENCE, CULPRIT, FAULTS, KILLS, LIMIT, MARK, SLACK, WORLD, run, serve
from harness import limits
from harness.ranks import Ranks, connect_store, wait_for

APIS = {
    "direct, shm": "shm",
    "direct, gloo": "gloo",
    "DDP": "ddp",
    "direct, accelerator": "sim",
    "DDP, accelerator": "ddp-sim",
}
MODES = ("raise", "end")
RECORDED = {"DDP", "direct, accelerator", "DDP, accelerator"}  # without being asked
# These have no way to happen there.
IMPOSSIBLE = {
    (api, fault)
    for api in ("DDP", "DDP, accelerator")
    for fault in ("another root", "a root of its own", "another message")
}

POSSIBLE = {fault: [api for api in APIS if (api, fault) not in IMPOSSIBLE] for fault in FAULTS}
CELLS = [
    (fault, api, mode)
    for fault in FAULTS
    for api, mode in itertools.product(POSSIBLE[fault], MODES)
]
# Each fault over two libraries, one in each mode; over all faults each library comes in each.
QUICK = {
    (fault, POSSIBLE[fault][(number + 2 * shift) % len(POSSIBLE[fault])], mode)
    for number, fault in enumerate(FAULTS)
    for shift, mode in enumerate(MODES)
}


# ---------------------------------------------------------------- in the test


def processes_marked(mark):
    """(pid, command) of those that a rank has started: they have its environment."""
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                yield folder.name, (folder / "cmdline").read_text().replace("\0", " ")


class Cell:
    """One cell: begun, then looked at, so that several can be under way together."""

    def __init__(self, fault, api, mode):
        self.fault, self.api, self.mode = fault, api, mode
        self.dumps = tempfile.TemporaryDirectory(prefix="torchcomms_pg-matrix-")
        self.ranks = Ranks(WORLD, init=False, env={MARK: self.dumps.name})
        self.server, server = None, None
        self.args = Ranks.store_args()
        if fault == "store server gone":
            self.server = Ranks(1, init=False)
            self.server.start(serve)
            server = (self.server.wait_report(0), "lost")
        self.ranks.start(run, fault, APIS[api], mode, self.args, server, self.dumps.name)
        if self.server:
            store = connect_store(*self.args)
            deadline = time.monotonic() + 30
            while store.add("ready", 0) < WORLD and time.monotonic() < deadline:
                time.sleep(0.02)
            self.server.kill(0)
            store.set("server gone", "")

    def problems(self):
        """Waits for its end; what is not as promised."""
        try:
            outcomes = self.ranks.wait(LIMIT + ABSENCE + SLACK + 15)
            found = []
            for rank, outcome in enumerate(outcomes):
                found += [f"rank {rank}: {what}" for what in self._look(rank, outcome)]
            found += self._dumps()
        finally:
            self._end()
        return found + list(self._left())

    def _end(self):
        self.ranks.busy = True
        self.ranks.close()
        self.dumps.cleanup()
        if self.server:
            self.server.close()

    def _left(self):
        for rank in range(WORLD):
            if self.ranks.exit_code(rank, 0) is None:
                yield f"rank {rank} is left"
        started = lambda: list(processes_marked(self.dumps.name))  # noqa: E731
        wait_for(lambda: not started(), 5)
        if orphans := started():
            yield f"these processes are left: {orphans}"
        pids = {str(pid) for pid in self.ranks.pids}
        for name in os.listdir("/dev/shm"):
            if pids & set(re.findall(r"\d+", name)):
                yield f"left in /dev/shm: {name}"

    def _look(self, rank, outcome):
        expected = FAULTS[self.fault]
        if outcome.hung or outcome.error:
            yield (outcome.hung or outcome.error)[-1500:]
        elif rank == CULPRIT and self.fault in ("sys.exit", *KILLS):
            code = self.ranks.exit_code(rank)
            if code != (3 if self.fault == "sys.exit" else -9):
                yield f"exit code {code}"
        elif expected is None:
            if outcome.died or outcome.value[0] or outcome.value[3]:
                yield f"has failed: {outcome.died or outcome.value}"
        elif outcome.died:
            yield from self._ended(rank)
        else:
            yield from self._raised(rank, *outcome.value)

    def _ended(self, rank):
        code, output = self.ranks.exit_code(rank), self.ranks.output(rank)
        if self.mode != "end" or code != 1:
            yield f"ended with exit code {code}: {output[-1500:]}"
        elif "torchcomms_pg ends this process" not in output:
            yield f"does not say why it ends: {output[-1500:]}"
        elif rank != CULPRIT and not re.search(FAULTS[self.fault], self._said(rank)):
            yield f"does not say what is promised: {output[-1500:]}"

    def _said(self, rank):
        """What the rank has printed, and its verdicts, whole."""
        return "\n".join([self.ranks.output(rank), *self.ranks.verdicts(rank)])

    def _raised(self, rank, error, text, took, afterwards):
        guilty = rank == CULPRIT
        own = guilty and self.fault in ("raises in Python", "abort during an operation")
        if self.mode == "end" and not own:
            yield f"has not ended, but got {error or 'nothing'}: {text}"
            return
        if not error:
            yield "has not failed"
        elif not own and error not in ("CommError", "DistBackendError"):
            yield f"raised {error}: {text}"
        elif not guilty and not re.search(FAULTS[self.fault], text):
            yield f"does not say what is promised: {text}"
        limit = LIMIT + limits.grown(SLACK) + (ABSENCE if guilty or "destroy" in self.fault else 0)
        if took > limit:
            yield f"took {took:.1f} s, more than {limit:.1f}"
        if afterwards:
            yield afterwards

    def _dumps(self):
        if self.api not in RECORDED or FAULTS[self.fault] is None:
            return
        there = {path.name for path in pathlib.Path(self.dumps.name).iterdir()}
        for rank in range(WORLD):
            if f"trace_{rank}" not in there and rank != CULPRIT:
                yield f"rank {rank} has written no dump"


def run_matrix(cells=tuple(CELLS), together=6):
    """Yields each cell with what is wrong with it, in order."""
    waiting = []
    for cell in [*cells, *[None] * together]:
        if len(waiting) == together or (cell is None and waiting):
            name, under_way = waiting.pop(0)
            yield name, under_way.problems()
        if cell is not None:
            waiting.append((cell, Cell(*cell)))


def table(results):
    columns = [(api, mode) for api in APIS for mode in MODES]
    lines = ["| fault | " + " | ".join(f"{api}: {mode}" for api, mode in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for fault in FAULTS:
        marks = []
        for api, mode in columns:
            problems = results.get((fault, api, mode))
            marks.append("-" if problems is None else "FAILS" if problems else "ok")
        lines.append(f"| {fault} | " + " | ".join(marks) + " |")
    return "\n".join(lines)


def main():
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    begun = time.monotonic()
    results = {}
    for cell, problems in run_matrix([c for c in CELLS if part in " / ".join(c)]):
        results[cell] = problems
        for problem in problems:
            print(f"{' / '.join(cell)}: {problem}", flush=True)
    print(table(results))
    failed = sum(1 for problems in results.values() if problems)
    print(f"{len(results)} cells, {failed} failed, {time.monotonic() - begun:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    from failures import fault_matrix
    from harness import ranks

    try:
        status = fault_matrix.main()
    finally:
        ranks.close_all()
    sys.exit(status)
