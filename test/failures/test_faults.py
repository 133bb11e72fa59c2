"""Ranks that die, fork, leak or run many threads: named, released, and nothing left behind."""

import contextlib
import functools
import itertools
import os
import random
import re
import resource
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from harness import ROOT, catalogue
from harness.comms import make, torchcomms
from harness.leaks import descriptors, mappings
from harness.limits import grown
from harness.programs import run_python
from harness.ranks import (
    BACKEND,
    Ranks,
    check,
    connect_store,
    init_default_group,
    meet,
    on_ranks,
    thread_names,
    wait_for,
)
from harness.values import all_data, assert_reduced, assert_same
from torchcomms_pg.testing.rank import report

beyond_gloo = pytest.mark.beyond_gloo
CPU = torch.device("cpu")


def shared_memory():
    """Without the semaphores of Python's multiprocessing, which tests side by side use."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def assert_nothing_left(before):
    """Other programs may come and go in /dev/shm, so what is new must vanish soon."""
    left = shared_memory() - before
    gone = wait_for(lambda: not left & shared_memory(), 5)
    assert gone, f"left in /dev/shm: {sorted(left & shared_memory())}"


def until_failure(peers_of=None):
    """Collectives of all sizes for ever; the error that ends them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = random.Random(17)
    for turn in range(10**9):
        try:
            size = generator.choice([1, 100, 5000, 100_000, 1_000_000])
            kind = generator.choice(["all_reduce", "all_gather", "ring", "barrier"])
            if kind == "all_reduce":
                dist.all_reduce(torch.ones(size))
            elif kind == "all_gather":
                dist.all_gather_into_tensor(torch.empty(world * size), torch.ones(size))
            elif kind == "ring":
                operations = [
                    dist.P2POp(dist.isend, torch.ones(size), (rank + 1) % world),
                    dist.P2POp(dist.irecv, torch.empty(size), (rank - 1) % world),
                ]
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
            else:
                dist.barrier()
        except RuntimeError as error:
            return type(error).__name__, str(error), getattr(error, "ranks", None), turn
        if turn == 3:
            report("running")


@beyond_gloo
@pytest.mark.parametrize("seed", range(6))
def test_a_rank_dead_by_kill_9_at_a_random_moment_is_named_by_all_survivors(seed):
    before = shared_memory()
    generator = random.Random(seed)
    world = generator.choice([2, 3, 4])
    victim = generator.randrange(world)
    with Ranks(world) as ranks:
        ranks.start(until_failure)
        for rank in range(world):
            ranks.wait_report(rank)
        time.sleep(generator.random() / 5)  # the random moment
        ranks.kill(victim)
        begin = time.monotonic()
        outcomes = ranks.wait()
        took = time.monotonic() - begin
        assert "was killed by SIGKILL" in outcomes[victim].died
        survivors = [o for o in outcomes if o.rank != victim]
        check(survivors)
        assert took < grown(20), f"the survivors took {took:.1f} s"  # their deadline is after 30 s
        for outcome in survivors:
            name, text, named, _ = outcome.value
            assert name == "CommError", text
            assert victim in named, (named, text)
            assert re.search(rf"(?i)rank[^.]*\b{victim}\b", text), text
    assert_nothing_left(before)


@beyond_gloo
@pytest.mark.parametrize("seed", range(4))
def test_a_rank_dead_by_kill_9_during_init_leaves_nothing_and_ends_in_time(seed):
    before = shared_memory()
    generator = random.Random(seed)
    with Ranks(3, init=False) as ranks:
        ranks.start(init_loop, [ranks.store_args() for _ in range(200)], 3)
        ranks.wait_report(0)
        time.sleep(generator.random() / 10)
        ranks.kill(seed % 3)
        outcomes = ranks.wait()
        check([o for o in outcomes if o.rank != seed % 3])
    assert_nothing_left(before)


def init_loop(ports, world):
    """Starting and ending groups until a peer is gone; that must be an error, not a hang."""
    rank = int(os.environ["RANK"])
    for turn, args in enumerate(ports):
        try:
            init_default_group(*args, rank, world, 5)
            dist.all_reduce(torch.ones(10))
            dist.destroy_process_group()
        except RuntimeError as error:
            return str(error)
        if turn == 0:
            report("running")


LOOKS_AND_NAPS = 20  # a rank that waits sleeps some times between two looks at its peers


def late_without_descriptors():
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(f"/proc/{pids[0]}/status") as status:

        def naps():
            status.seek(0)
            return int(re.search(r"\nvoluntary_ctxt_switches:\t(\d+)", status.read())[1])

        dist.barrier()
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            if dist.get_rank() == 1:
                enough = naps() + LOOKS_AND_NAPS
                assert wait_for(lambda: naps() >= enough, 20)
            dist.all_reduce(tensor := torch.ones(1))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return tensor.item()


@beyond_gloo
def test_a_late_rank_is_not_dead_for_want_of_a_descriptor():
    with Ranks(2) as ranks:
        assert ranks.run(late_without_descriptors) == [2.0, 2.0]


def hold_group():
    dist.all_reduce(torch.ones(1_000_000))
    report("used")
    dist.barrier()


@beyond_gloo
def test_nothing_is_in_dev_shm_while_a_group_is_alive():
    """Names are removed as soon as every rank has mapped them: no kill can leave one."""
    before = shared_memory()
    with Ranks(3) as ranks:
        ranks.run(hold_group)
        assert_nothing_left(before)
    assert_nothing_left(before)


def resources():
    mapped = [*mappings("memfd:"), *mappings("/dev/shm")]
    return sorted(thread_names()), sorted(descriptors().values()), mapped


def leak_check(ports, world):
    rank = int(os.environ["RANK"])

    def life(args):
        store = connect_store(*args)
        init_default_group(*args, rank, world, 30)
        work = dist.all_reduce(torch.ones(300_001), async_op=True)
        work.get_future().then(lambda f: None).wait()
        group = dist.new_group()
        dist.all_to_all_single(torch.empty(world * 100), torch.ones(world * 100), group=group)
        dist.destroy_process_group(group)
        dist.destroy_process_group()
        store.add("gone", 1)  # rank 0's process is not the store's, so this cannot race
        del store, work, group

    life(ports[0])  # torch's own lazily started threads and files
    before = resources()
    for args in ports[1:]:
        life(args)

    def back():
        now = resources()
        return len(now[0]) <= len(before[0]) and len(now[1]) <= len(before[1]) and not now[2]

    ok = wait_for(back, 10)
    return ok, before, resources()


def test_no_thread_no_descriptor_and_no_mapping_is_left_after_destroy():
    with Ranks(2, init=False) as ranks:
        values = ranks.run(leak_check, [ranks.store_args() for _ in range(6)], 2)
    for ok, before, after in values:
        assert ok, f"before: {before}\nafter: {after}"


def threads_after_destroy(args, world):
    before = resources()[0]
    init_default_group(*args, int(os.environ["RANK"]), world, 30)
    dist.all_reduce(torch.ones(10), async_op=True).wait()
    dist.destroy_process_group()
    wait_for(lambda: len(resources()[0]) <= len(before), 30)
    return before, resources()[0]


@beyond_gloo
def test_the_last_destroy_ends_all_threads():
    with Ranks(2, init=False) as ranks:
        for before, after in ranks.run(threads_after_destroy, ranks.store_args(), 2):
            assert len(after) <= len(before), (before, after)


def operations(world, comm):
    """Each operation over c10d and over TorchComm, by its name, as a program calls it."""
    for each, over in ((catalogue.OPERATIONS, None), (catalogue.TORCHCOMM, comm)):
        for name, operation in each.items():
            for how in ("sync", "async"):
                case = catalogue.Case(world, 10, how, comm=over)
                yield f"{how} {name}", functools.partial(operation, case)


def methods(*objects):
    """Each attribute of theirs, by its name: called with what may be its arguments, or read."""
    tensor = torch.ones(10)
    likely = ((), (tensor,), ([tensor],), ([tensor], [tensor]), ([tensor], 0, 0), (0,), ("0",))

    def use(owner, name):
        attribute = getattr(owner, name)
        for arguments in likely if callable(attribute) else ():
            with contextlib.suppress(TypeError):
                return attribute(*arguments)

    for owner in objects:
        for name in dir(owner):
            if not name.startswith("__"):
                yield f"{type(owner).__name__}.{name}", functools.partial(use, owner, name)


def child_uses(calls):
    """Forks a child that makes the calls one after another, and returns what came of each."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        for name, call in calls:
            os.write(writing, f"{name}\t".encode())
            try:
                came = repr(call())
            except BaseException as error:
                came = f"{type(error).__name__}: {error}"
            os.write(writing, came.replace("\n", " ").encode()[:300] + b"\n")
        os._exit(0)
    os.close(writing)
    told = b""
    while select.select([reading], [], [], grown(20))[0] and (more := os.read(reading, 65536)):
        told += more
    os.close(reading)
    hangs = told[-1:] != b"\n"
    if hangs:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    told = dict(line.split("\t") for line in told.decode(errors="replace").splitlines())
    assert (hangs, code) == (False, 0), f"a forked child, its last calls: {list(told.items())[-3:]}"
    return told


@beyond_gloo
@on_ranks(1, 2)
def test_every_operation_raises_in_a_forked_child_and_the_parent_goes_on(world):
    dist.all_reduce(torch.ones(10), async_op=True).wait()  # the thread that works exists
    comm = make("parent")
    for name, came in child_uses(list(operations(world, comm))).items():
        assert "Error" in came and "fork" in came, f"{name}: {came}"
    dist.all_reduce(tensor := torch.ones(300_001))
    assert tensor[-1] == world
    comm.finalize()


def has_children_amid_its_work(args):
    rank = int(os.environ["RANK"])
    init_default_group(*args, rank, 2, 120)
    comm = make("parent")
    group = dist.group.WORLD
    issued = [torch.ones(10) for _ in range(6)]

    def issue():
        return [
            *(dist.all_reduce(tensor, async_op=True) for tensor in issued[:3]),
            *(comm.all_reduce(tensor, torchcomms().ReduceOp.SUM, True) for tensor in issued[3:]),
        ]

    works = issue() if rank == 0 else []
    if rank == 0:
        backend = group._get_backend(CPU)
        told = child_uses(
            [
                *methods(backend, group, comm, works[0], works[-1]),
                ("destroy", dist.destroy_process_group),
            ]
        )
        assert len(told) > 150, sorted(told)
    meet(dist.distributed_c10d._get_default_store(), "children have ended", 2)
    for work in works or issue():
        work.wait()
    assert all(tensor[0] == 2 for tensor in issued)
    comm.finalize()
    dist.destroy_process_group()


@beyond_gloo
def test_no_method_of_a_group_hangs_in_a_child_that_is_forked_amid_its_work():
    """Threads of the parent have locks, and operations in flight that nobody ends in the child."""
    with Ranks(2, init=False) as ranks:
        ranks.run(has_children_amid_its_work, ranks.store_args(), timeout=grown(120))


@beyond_gloo
@on_ranks(2, 3)
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_threads_issuing_on_one_group_at_once_get_right_results(world, async_op):
    """All calls are alike, so that any order of the threads pairs them rightly."""

    def issue(number):
        for _ in range(25):
            tensor = torch.full((20_001,), dist.get_rank() + 1.0)
            work = dist.all_reduce(tensor, async_op=async_op)
            if work is not None:
                work.wait()
            assert_same(tensor, torch.full((20_001,), world * (world + 1) / 2))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(issue, range(4)))


@on_ranks(2)
def test_threads_may_use_groups_of_their_own(world):
    groups = [dist.new_group() for _ in range(4)]

    def issue(number):
        for turn in range(10):
            inputs = all_data(world, 30_001, salt=100 * number + turn)
            tensor = inputs[dist.get_rank()].clone()
            dist.all_reduce(tensor, group=groups[number])
            assert_reduced(tensor, inputs)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(issue, range(4)))
    for group in groups:
        dist.destroy_process_group(group)


# A program's end, and the exit code it is to have.
ENDINGS = {
    "no destroy": ("pass", 0),
    "destroy": ("dist.destroy_process_group()", 0),
    "work in flight": ("w = dist.all_reduce(torch.ones(2_000_000), async_op=True)", 0),
    "works in flight": (
        "w = [dist.all_reduce(torch.ones(99), async_op=True) for _ in range(2000)]",
        0,
    ),
    "work no peer joins": ("w = rank == 0 and dist.barrier(async_op=True)", 0),
    "sys.exit": ("sys.exit(5)", 5),
    "group in a cycle": (
        "cycle = [dist.group.WORLD]; cycle.append(cycle)\n"
        "dist.all_reduce(torch.ones(9), async_op=True); dist.barrier(); sys.exit()",
        0,
    ),
    "exception": ("raise KeyError('the script fails')", 1),
}
QUICK_ENDINGS = ("destroy", "works in flight", "exception")
SCRIPT = f"""
if {BACKEND!r} == "torchcomms":
    import torchcomms_pg
dist.init_process_group({BACKEND!r}, init_method=store, rank=rank, world_size=2)
dist.all_reduce(torch.ones(100_001))
dist.all_reduce(torch.ones(11), async_op=True).wait()
"""
# Imports torch once for all scripts: for each that it reads it becomes two ranks, which run it and
# end as any interpreter does, and prints their exit codes.
SCRIPTS = """
import os, signal, sys, torch, torch.distributed as dist

def is_rank():
    global rank, store, script
    for line in iter(sys.stdin.readline, ""):
        store, script = eval(line)
        pids = []
        for rank in range(2):
            pids.append(os.fork())
            if pids[-1] == 0:
                signal.alarm(40)  # ends one that hangs
                return True
        print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids], flush=True)
    return False

if is_rank():
    exec(script)
"""


def start_python(program, *arguments, **options):
    env = dict(os.environ, OMP_NUM_THREADS="1")
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, env=env, text=True, **options)


@pytest.fixture(scope="module")
def end_a_script(tmp_path_factory):
    """Runs a script on two ranks; (exit codes, what they print as errors)."""
    folder = tmp_path_factory.mktemp("scripts")
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    stores = itertools.count()
    with open(folder / "errors", "w") as errors, open(folder / "errors") as printed:
        with start_python(SCRIPTS, stderr=errors, **pipes) as process:

            def run(script):
                store = f"file://{folder}/store{next(stores)}"
                print((store, script), file=process.stdin, flush=True)
                return process.stdout.readline().strip(), printed.read()

            yield run


@pytest.mark.torch_version
@pytest.mark.parametrize(
    "ending",
    [
        ending if ending in QUICK_ENDINGS else pytest.param(ending, marks=pytest.mark.slow)
        for ending in ENDINGS
    ],
)
def test_a_script_that_ends_with_or_without_destroy_exits_in_time(ending, end_a_script):
    """With its own exit code: the backend neither hangs nor crashes at interpreter exit."""
    if BACKEND == "gloo" and ending != "destroy":
        pytest.skip("Gloo's threads may crash an interpreter that ends without destroy")
    before = shared_memory()
    line, wanted = ENDINGS[ending]
    codes, errors = end_a_script(SCRIPT + line)
    assert codes == str([wanted] * 2), errors
    assert ("Traceback" in errors) == (ending == "exception"), errors
    if BACKEND == "torchcomms":
        assert_nothing_left(before)


FORKED = """
import os, sys, torch, torch.distributed as dist, torchcomms_pg

pids = []
for rank in range(2):
    pids.append(os.fork())
    if pids[-1] == 0:
        store = f"file://{sys.argv[1]}/store"
        dist.init_process_group("torchcomms", init_method=store, rank=rank, world_size=2)
        dist.barrier()
        if rank == 0:
            dist.all_reduce(torch.ones(9), async_op=True)
        else:
            try:
                dist.recv(torch.ones(1), 0)
            except torchcomms_pg.CommError as error:
                print(error, flush=True)
        sys.exit()
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
"""


@pytest.mark.slow
@beyond_gloo
def test_a_process_that_was_forked_after_the_import_gives_up_what_is_in_flight_at_its_end(tmp_path):
    """As any other: threads that hold tensors must not outlive its interpreter."""
    done = run_python("-c", FORKED, tmp_path, OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
    assert "aborted on rank 0 by the end of its Python interpreter" in done.stdout, done.stderr
    assert done.stdout.endswith("[0, 0]\n"), done.stdout


@pytest.mark.skipif(BACKEND == "gloo", reason="Gloo's threads may crash such an interpreter")
@pytest.mark.slow
def test_a_script_whose_libraries_end_slowly_is_not_disturbed_by_other_ranks(tmp_path):
    """A rank that fails asks the others for dumps, also those that are past their interpreters.

    What libtorch holds in static objects is gone by then. The C library calls last what was
    registered first, before libtorch was loaded.
    """
    before = shared_memory()
    first = f"""
import ctypes; ctypes.CDLL(None).__cxa_atexit(ctypes.CDLL(None).usleep, 5_000_000, None)
import sys, torch, torch.distributed as dist
rank, store = int(sys.argv[1]), "file://{tmp_path}/store"
"""
    program = first + SCRIPT + ENDINGS["work no peer joins"][0]
    ranks = [start_python(program, str(rank), stderr=subprocess.PIPE) for rank in range(2)]
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=40)
            assert process.returncode == 0, (process.returncode, errors[-3000:])
    finally:
        for process in ranks:
            process.kill()
    assert_nothing_left(before)


def ten_errors():
    """Failed groups give back what they hold, too."""
    import datetime

    store = dist.group.WORLD.get_group_store()
    before = None
    for turn in range(6):
        group = dist.new_group()
        dist.barrier(group)
        group.set_timeout(datetime.timedelta(seconds=0.3))
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.ones(10), group=group)
            store.set(f"turn{turn}", "")
        store.wait([f"turn{turn}"])
        dist.distributed_c10d._abort_process_group(group)
        del group
        if turn == 1:
            before = resources()
    # They go one after another, on threads of their own.
    most = [len(before[0]), len(before[1]) + 1, len(before[2])]
    few = lambda: all(len(x) <= n for x, n in zip(resources(), most))  # noqa: E731
    assert wait_for(few, 10), (before, resources())


@beyond_gloo
def test_groups_that_failed_leave_no_thread_descriptor_or_mapping():
    with Ranks(2) as ranks:
        ranks.run(ten_errors)
