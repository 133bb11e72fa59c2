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

import atexit
import contextlib
import ctypes
import datetime
import gc
import itertools
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist

import torchcomms_pg
from harness.ranks import Ranks, connect_store, receive, report, thread_names, wait_for
from harness.scarcity import no_more_descriptors, no_more_threads

WORLD = 3
CULPRIT = 1
LIMIT = 2.5  # a rank that comes later than that is at fault, too
SLACK = 5.0
ABSENCE = LIMIT + 4.0  # longer than its peers need to give it up

# Of the environment of what a rank starts, to find it again.
MARK = "TORCHCOMMS_PG_TEST_CELL"

# Fault, and what the error of the other ranks says; None: nothing fails.
FAULTS = {
    "never calls": r"rank 1 has not arrived at .*(\n.*)*in stays_away",
    "calls late": None,
    "another operation": r"different operations|disagree",
    "another size": r"different operations|disagree",
    "another dtype": r"different operations|disagree",
    # Over Gloo the one that has sent its part is done, and waits for the others in the next.
    "another root": r"different operations|disagree|have not arrived at all_reduce #4",
    "a root of its own": r"different operations|disagree",
    "another message": r"receives 1000 float32 from rank 1, which sends 999|disagree",
    # A rank whose process the other group's deadline has ended no longer answers.
    "another order of groups": r"rank 1 (has not arrived at .*(\n.*)*in all_reduce|did not answer)",
    "raises in Python": r"rank 1\b.*(left|died|destroyed)",
    "sys.exit": r"rank 1\b.*(left|died|destroyed)",
    "kill -9": r"rank 1\b.*died",
    "kill -9 in new_group": r"rank 1\b.*died",
    "SIGSTOP for a while": r"rank 1: its process is stopped \(pid \d+\)",
    "no thread to spare": r"rank 1 has not arrived at ",
    # It cannot always answer.
    "no descriptor to spare": r"rank 1 (has not arrived at|did not answer)",
    "holds the GIL": r"rank 1: .*(\n.*)*holds the GIL(.*\n)*.*in native_code",
    "compiles long": None,
    # NCCL does not carry the reason: on an accelerator the others know whose doing it was.
    "abort during an operation": r"aborted on rank 1|rank 1 .*revoked the communicator",
    "destroy with operations in flight": r"ranks 0, 2 have not arrived",
    # Those whom another rank's failure reaches first have its words; over Gloo these went through
    # the store, and what is left is the broken connection.
    "store server gone": r"it cannot be known what the other ranks do: the store"
    r"|gave up: .* timed out|rank \d .*revoked the communicator"
    r"|rank [02] died or left: its connection is broken",
}
APIS = {
    "direct, shm": "shm",
    "direct, gloo": "gloo",
    "DDP": "ddp",
    "direct, accelerator": "sim",
    "DDP, accelerator": "ddp-sim",
}
MODES = ("raise", "end")
RECORDED = {"DDP", "direct, accelerator", "DDP, accelerator"}  # without being asked
KILLS = ("kill -9", "kill -9 in new_group")
# Those of rank 1's deeds that let the others begin at a moment of their own.
BEGIN_THEMSELVES = (
    "never calls",
    "SIGSTOP for a while",
    "no thread to spare",
    "no descriptor to spare",
    "holds the GIL",
    "compiles long",
)
# These have no way to happen there.
IMPOSSIBLE = {
    (api, fault)
    for api in ("DDP", "DDP, accelerator")
    for fault in ("another root", "a root of its own", "another message")
}

CELLS = [
    (fault, api, mode)
    for fault, api, mode in itertools.product(FAULTS, APIS, MODES)
    if (api, fault) not in IMPOSSIBLE
]


# ---------------------------------------------------------------- in a rank


class Group:
    """What the cells need of each API: operations, a second group, and their end."""

    def __init__(self, api, store, mode, name):
        rank = int(os.environ["RANK"])
        joining = datetime.timedelta(seconds=30)
        self.api, self.store, self.name = api, store, name
        self.rank = rank
        self.ddp = api.startswith("ddp")
        self.is_process_group = self.ddp or api == "sim"
        self.device = device_of(api)
        if self.is_process_group:
            options = {"store": dist.PrefixStore(name, store), "rank": rank, "world_size": WORLD}
            dist.init_process_group("torchcomms", timeout=joining, **options)
            self.second = dist.new_group(timeout=joining)
            if self.ddp:
                torch.manual_seed(1)
                linear = torch.nn.Linear(100, 10).to(self.device)
                self.model = torch.nn.parallel.DistributedDataParallel(linear)
            self.all_reduce(torch.ones(1), group=self.second)
            self.operate()
            groups = (None, self.second)
            self.set_limit(*(torchcomms_pg.get_comm(group, self.device) for group in groups))
            return
        self.reduce_op = torchcomms_pg.ReduceOp.SUM
        options = {"store": store, "rank": rank, "size": WORLD, "timeout": joining}
        options["abort_process_on_timeout_or_error"] = mode == "end"
        self.comm = torchcomms_pg.new_comm(api, "cpu", name, **options)
        self.second = self.comm.split(list(range(WORLD)), name + "/second")
        self.second.barrier(async_op=False)
        self.operate()
        self.set_limit(self.comm, self.second)

    def set_limit(self, *comms):
        for comm in comms:
            comm.set_timeout(datetime.timedelta(seconds=LIMIT))

    def operate(self):
        if self.ddp:
            self.model(torch.ones(4, 100, device=self.device)).sum().backward()
            if self.device != "cpu":
                torch.accelerator.synchronize()
                self.all_reduce(torch.ones(1))
        else:
            self.all_reduce(torch.ones(1000))

    def all_reduce(self, tensor, async_op=False, group=None):
        if not self.is_process_group:
            return self.comm.all_reduce(tensor, self.reduce_op, async_op=async_op)
        if self.device == "cpu":
            return dist.all_reduce(tensor, group=group, async_op=async_op)
        work = dist.all_reduce(tensor.to(self.device), group=group, async_op=True)
        if async_op:
            return work
        torch.accelerator.synchronize()
        work.wait()

    def broadcast(self, tensor, root):
        if not self.is_process_group:
            self.comm.broadcast(tensor, root, async_op=False)
            return
        self._wait_for(dist.broadcast(tensor.to(self.device), root, async_op=True))

    def send(self, tensor):
        """From the culprit to rank 0."""
        if self.is_process_group:
            self._wait_for(dist.isend(tensor.to(self.device), 0))
        else:
            self.comm.send(tensor, 0, async_op=False)

    def receive(self, tensor):
        if self.is_process_group:
            self._wait_for(dist.irecv(tensor.to(self.device), CULPRIT))
        else:
            self.comm.recv(tensor, CULPRIT, async_op=False)

    def _wait_for(self, work):
        if self.device != "cpu":
            torch.accelerator.synchronize()
        work.wait()

    def operate_in_second(self):
        if self.is_process_group:
            self.all_reduce(torch.ones(1), group=self.second)
        else:
            self.second.barrier(async_op=False)

    def divide(self):
        """Makes one more group, of all ranks."""
        if self.is_process_group:
            dist.new_group(timeout=datetime.timedelta(minutes=30))
        else:
            self.comm.split(list(range(WORLD)), self.name + "/third")

    def abort(self):
        if not self.is_process_group:
            self.comm.abort()
        elif dist.is_initialized():
            dist.distributed_c10d._abort_process_group()

    def close(self):
        if self.is_process_group:
            dist.destroy_process_group()
        else:
            self.comm.finalize()
            self.second.finalize()


def device_of(api):
    """Where the tensors of this API are; makes the simulated accelerator known."""
    if not api.endswith("sim"):
        return "cpu"
    import simulated

    simulated.install()
    torchcomms_pg.registration.serve_host_device("sim")
    return "sim:0"


def stays_away(group, begin=lambda: None):
    """Until they are done; where errors end the process, they do not say so."""
    begin()
    try:
        group.store.wait(["the others are done"], datetime.timedelta(seconds=ABSENCE))
    except dist.DistStoreError:
        pass


def native_code(begin):
    begin()
    ctypes.PyDLL(None).usleep(int(ABSENCE * 1e6))  # PyDLL, unlike CDLL, keeps the GIL


def is_stopped(begin):
    wake = f"sleep {ABSENCE + 4}; kill -CONT {os.getpid()}"  # its silence takes them longer
    helper = subprocess.Popen(["sh", "-c", wake])
    begin()
    os.kill(os.getpid(), signal.SIGSTOP)
    helper.wait()


def commit(fault, group, begin):
    """What rank 1 does instead of, or before, the operation of the others, who come at `begin`."""
    if fault not in BEGIN_THEMSELVES:
        begin()
    if fault == "never calls":
        stays_away(group, begin)
    elif fault == "no thread to spare":
        no_more_threads()
        stays_away(group, begin)
    elif fault == "no descriptor to spare":
        with no_more_descriptors():
            stays_away(group, begin)
    elif fault == "store server gone":
        time.sleep(ABSENCE + 4)
    elif fault == "calls late":
        time.sleep(LIMIT / 2)
    elif fault == "another operation":
        group.broadcast(torch.ones(1010), 0)
    elif fault == "another size":
        group.all_reduce(torch.ones(999))
    elif fault == "another dtype":
        group.all_reduce(torch.ones(1010 if group.ddp else 1000, dtype=torch.float64))
    elif fault == "another root":
        group.broadcast(torch.ones(1000), 2)
    elif fault == "a root of its own":
        group.broadcast(torch.ones(1000), CULPRIT)
    elif fault == "another message":
        group.send(torch.ones(999))
    elif fault == "another order of groups":
        group.operate_in_second()
    elif fault == "raises in Python":
        try:
            raise KeyError("the program fails")
        except KeyError:
            group.close()  # as a program does that has a finally
            raise
    elif fault == "sys.exit":
        atexit._run_exitfuncs()  # what of sys.exit() concerns others; this is a forked process
        os._exit(3)
    elif fault in KILLS:
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "SIGSTOP for a while":
        is_stopped(begin)
    elif fault == "holds the GIL":
        native_code(begin)
    elif fault == "compiles long":
        from torch._dynamo.callback import CallbackTrigger, callback_handler

        with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/0"):
            begin()
            time.sleep(LIMIT * 2)
    elif fault == "abort during an operation":
        wait_for(lambda: group.store.add("in the operation", 0) == WORLD - 1, 30)
        group.abort()
    elif fault == "destroy with operations in flight":
        work = group.all_reduce(torch.ones(1000), async_op=True)
        try:
            group.close()
        finally:
            work.wait()


def run(fault, api, mode, args, server, dumps):
    """Returns what became of this rank: (error, its text, seconds, what is wrong afterwards)."""
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = os.path.join(dumps, "trace_")
    os.environ["TORCHCOMM_ABORT_ON_ERROR"] = "true" if mode == "end" else "false"
    store = connect_store(*args)
    meeting = connect_store(*server) if server else store
    device_of(api)
    before = descriptors()
    group = Group(api, meeting, mode, "tested")
    # None does what it is to do before all have done what goes before.
    if store.add("made", 1) == WORLD:
        store.set("all made", "")
    store.wait(["all made"], datetime.timedelta(seconds=30))
    if server:
        store.add("ready", 1)
        store.wait(["server gone"], datetime.timedelta(seconds=30))
    if group.rank != CULPRIT:
        store.wait(["it begins"], datetime.timedelta(seconds=30))
    begun, error, text = time.monotonic(), "", ""
    try:
        if group.rank == CULPRIT:
            commit(fault, group, lambda: store.set("it begins", ""))
        elif fault == "destroy with operations in flight":
            stays_away(group)
        elif fault == "abort during an operation":
            store.add("in the operation", 1)
        if fault == "kill -9 in new_group":
            # Over Gloo, and where errors end the process, the group itself fails in it.
            with contextlib.suppress(torchcomms_pg.CommError):
                group.divide()
        if fault in ("another root", "a root of its own") and group.rank != CULPRIT:
            group.broadcast(torch.ones(1000), 0)
        elif fault == "another message" and group.rank == 0:
            group.receive(torch.ones(1000))
        group.operate()
        group.operate_in_second()
    except Exception as raised:
        error, text = type(raised).__name__, str(raised)
    took = time.monotonic() - begun
    # All of them: one that is behind would be done with what the culprit calls then.
    done = group.rank != CULPRIT and store.add("done", 1) == WORLD - 1
    if done or fault == "destroy with operations in flight":
        store.set("the others are done", "")
    if mode == "end":
        if FAULTS[fault] is not None:
            time.sleep(ABSENCE)  # DDP's error may be here before dumps are written: then it ends
        return error, text, took, ""
    wrong = goes_on(fault, args, group)
    del group
    if not server:
        wrong = wrong or what_is_left(before)
    return error, text, took, wrong


def goes_on(fault, args, group):
    """A new group of the ranks that are left, in the same processes; what is wrong with it."""
    try:
        closed = fault in ("raises in Python", "destroy with operations in flight")
        if FAULTS[fault] is not None and not closed:
            group.abort()
        if not group.is_process_group or dist.is_initialized():
            group.close()
        gone = fault in ("sys.exit", *KILLS, "no thread to spare")  # which cannot make groups
        if gone and group.rank == CULPRIT:
            return ""
        left = [r for r in range(WORLD) if r != CULPRIT or not gone]
        rank = left.index(int(os.environ["RANK"]))
        options = {"store": connect_store(*args), "rank": rank}
        dist.init_process_group("torchcomms", world_size=len(left), **options)
        dist.all_reduce(tensor := torch.ones(10, device=group.device))
        total = tensor[0].item()
        dist.destroy_process_group()
        return "" if total == len(left) else f"the new group's sum is {total}"
    except Exception as raised:
        return f"no new group: {type(raised).__name__}: {raised}"


def serve():
    """The store that is lost; until its process is killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    report(store.port)
    receive()


def descriptors():
    """What this process has open, by number."""
    links = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own
            links[number] = os.readlink(f"/proc/self/fd/{number}")
    return links


def threads():
    return [name for name in thread_names() if name.startswith("tcpg_")]


def mappings():
    with open("/proc/self/maps") as file:
        return [line.split()[-1] for line in file if "memfd:torchcomms_pg" in line]


def what_is_left(before):
    """Of all groups, when they are destroyed; "": nothing."""
    gc.collect()

    def left():
        new = [link for number, link in descriptors().items() if before.get(number) != link]
        return [*threads(), *mappings(), *new]

    wait_for(lambda: not left(), 10)
    return f"left behind: {left()}" if left() else ""


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
        elif rank != CULPRIT and not re.search(FAULTS[self.fault], output):
            yield f"does not say what is promised: {output[-1500:]}"

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
        limit = LIMIT + SLACK + (ABSENCE if guilty or "destroy" in self.fault else 0)
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
