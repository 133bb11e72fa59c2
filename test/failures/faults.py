"""What a rank does in a cell of the fault matrix: its operations, each fault, and what is left.

fault_matrix.py has the cells.
"""

import atexit
import contextlib
import ctypes
import datetime
import gc
import os
import signal
import subprocess
import time

import torch
import torch.distributed as dist

import torchcomms_pg
from harness.leaks import descriptors, library_threads, mappings
from harness.ranks import connect_store, meet, wait_for
from harness.scarcity import no_more_descriptors, no_more_threads
from torchcomms_pg.testing.rank import receive, report

WORLD = 3
CULPRIT = 1
LIMIT = 2.5  # a rank that comes later than that is at fault, too
SLACK = 5.0
ABSENCE = LIMIT + 4.0  # longer than its peers need to give it up

# Of the environment of what a rank starts, to find it again.
MARK = "TORCHCOMMS_PG_TEST_CELL"

# Says the verdict, a rank that has compared, or the library where it failed before a rank's call.
DIFFERENT = r"different operations|disagree|mismatched collectives"

# Fault, and what the error of the other ranks says; None: nothing fails.
FAULTS = {
    "never calls": r"rank 1 has not arrived at .*(\n.*)*in stays_away",
    "calls late": None,
    "another operation": DIFFERENT,
    "another size": DIFFERENT,
    "another dtype": DIFFERENT,
    # Over Gloo the one that has sent its part is done, and waits for the others in the next.
    "another root": DIFFERENT + r"|have not arrived at all_reduce #4",
    "a root of its own": DIFFERENT,
    "another message": r"receives 1000 float32 from rank 1, which sends 999|disagree",
    # A rank that the other group's deadline has ended no longer answers.
    "another order of groups": r"deadlock: rank 0 waits in .* for rank 1, which waits in "
    r".* for rank 0|rank 1 did not answer|aborted on rank 1",
    "raises in Python": r"rank 1\b.*(left|died|destroyed)",
    # On a busy machine the end of Python takes longer than the timeout.
    "sys.exit": r"rank 1\b.*(left|died|destroyed)|rank 1 has not arrived at ",
    "kill -9": r"rank 1\b.*died",
    "kill -9 in new_group": r"rank 1\b.*died",
    "SIGSTOP for a while": r"rank 1: its process is stopped \(pid \d+\)",
    # They cannot always answer, or not in time on a busy machine.
    "no thread to spare": r"rank 1 (has not arrived at|did not answer)",
    "no descriptor to spare": r"rank 1 (has not arrived at|did not answer)",
    # Its stacks come when they come: on a busy machine they are not read in time.
    "holds the GIL": r"rank 1 has not arrived at .*(\n.*)*rank 1: .*(\n.*)*holds the GIL",
    "compiles long": None,
    # NCCL does not carry the reason: on an accelerator the others know whose doing it was.
    "abort during an operation": r"aborted on rank 1|rank 1 .*revoked the communicator",
    "destroy with operations in flight": r"ranks 0, 2 have not arrived",
    # Those whom another rank's failure reaches first have its words; over Gloo these went through
    # the store, and what is left is the broken connection, for which nobody is accused.
    "store server gone": r"it cannot be known what the other ranks do: the store"
    r"|gave up: .* timed out|rank \d .*revoked the communicator"
    r"|connection between rank \d and rank \d is broken .*the store is gone",
}
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


class Group:
    """What the cells need of each API: operations, a second group, and their end."""

    errors_end = True  # the process

    def __init__(self, api, store, mode, name):
        rank = int(os.environ["RANK"])
        joining = datetime.timedelta(seconds=30)
        self.api, self.store, self.name = api, store, name
        self.errors_end = mode == "end"
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
    """Until they are done, however late they begin; where errors end them, they do not say so."""
    begin()
    patience = ABSENCE if group.errors_end else 10 * ABSENCE
    try:
        group.store.wait(["the others are done"], datetime.timedelta(seconds=patience))
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


def operate_beside(fault, group):
    """What every rank calls while the culprit does wrong, or has come back."""
    if fault in ("another root", "a root of its own") and group.rank != CULPRIT:
        group.broadcast(torch.ones(1000), 0)
    elif fault == "another message" and group.rank == 0:
        group.receive(torch.ones(1000))
    group.operate()
    group.operate_in_second()


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
    meet(store, "made", WORLD)
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
        operate_beside(fault, group)
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


def what_is_left(before):
    """Of all groups, when they are destroyed; "": nothing."""
    gc.collect()

    def left():
        new = [link for number, link in descriptors().items() if before.get(number) != link]
        return [*library_threads(), *mappings(), *new]

    wait_for(lambda: not left(), 30)
    return f"left behind: {left()}" if left() else ""
