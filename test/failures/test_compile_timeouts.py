"""A rank that compiles is late, not lost; nor is one that has asked its peers to wait."""

import datetime
import json
import os
import pickle
import time

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from failures.joined import join
from harness.programs import run_python
from harness.ranks import Ranks, check, meet, on_own_ranks, time_limit, wait_for
from torchcomms_pg.testing.rank import receive

pytestmark = pytest.mark.beyond_gloo
LIMIT = 1.0
LATE = 2.6  # more than two deadlines


def reduce(comm):
    tensor = torch.ones(1000)
    comm.all_reduce(tensor, torchcomms_pg.ReduceOp.SUM, async_op=False)
    assert tensor[0] == comm.get_size()


def compiles_for_long(args, world, kind, given_up=False):
    from torch._dynamo.callback import CallbackTrigger, callback_handler

    comm, store = join(kind, args, world, LIMIT)
    if comm.get_rank() == 1:
        with callback_handler.install_callbacks(CallbackTrigger.LAZY_BACKWARD, "0/0"):
            meet(store, "rank 1 compiles", world)
            if given_up:
                store.wait(["given up"])
            else:
                time.sleep(LATE)  # being late is what is tested
                receive()
    else:
        meet(store, "rank 1 compiles", world)
    try:
        reduce(comm)
        return None
    except torchcomms_pg.CommError as error:
        return error.verdict
    finally:
        store.set("given up", "")
        meet(store, "done", world)


@pytest.mark.rotation
@pytest.mark.parametrize("kind", ["dist", "shm", "gloo"])
def test_a_timeout_is_extended_while_a_rank_compiles(kind):
    with Ranks(3, init=False) as ranks:
        ranks.start(compiles_for_long, ranks.store_args(), 3, kind)
        said = lambda: ranks.output(0) + ranks.output(2)  # noqa: E731
        wait_for(lambda: "has been compiling for" in said(), 20)
        ranks.tell(1, "compiled")
        outcomes = ranks.wait()
        check(outcomes)
        assert [outcome.value for outcome in outcomes] == [None] * 3
        output = said()
    told = [line for line in output.splitlines() if "has been compiling for" in line]
    assert 1 <= len(told) <= 2, output  # once for each rank that waited
    assert "all_reduce #2 (1000 x Float, SUM)" in told[0] and "rank 1" in told[0]


@pytest.mark.parametrize("seconds", ["0", "0.6"])
def test_a_timeout_is_extended_only_up_to_the_limit(seconds):
    env = {"TORCHCOMM_COMPILE_TIMEOUT_SECONDS": seconds}
    with Ranks(2, init=False, env=env) as ranks:
        with time_limit(0, 25, "the failure"):  # rank 1 would compile for longer
            verdict = ranks.run(compiles_for_long, ranks.store_args(), 2, "dist", True)[0]
    assert "rank 1 has not arrived" in verdict
    assert "it has been compiling for" in verdict


@on_own_ranks(2, init=False)
@pytest.mark.parametrize("reset", [False, True], ids=["", "after torch._dynamo.reset()"])
def test_a_real_compilation_is_waited_for_and_recorded(port, prefix, world, reset):
    def slow(graph, inputs):
        store.set("compiling", "")
        time.sleep(LATE)
        return graph.forward

    comm, store = join("dist", (port, prefix), world, LIMIT)
    if reset:
        torch._dynamo.reset()  # clears torch's list of whom to call
    if comm.get_rank() == 1:
        double = torch.compile(lambda x: x + x, backend=slow)
        assert double(torch.ones(3))[0] == 2
    else:
        store.wait(["compiling"])  # what comes before is nothing that peers wait for
    reduce(comm)
    recorder = torchcomms_pg._C.process_recorder()
    path = os.path.join(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + f"compiled{os.getpid()}")
    recorder.write(path, True)
    with open(path, "rb") as file:
        dump = pickle.load(file)
    os.unlink(path)
    for intervals in (json.loads(recorder.json(True)).get("compiling"), dump.get("compiling")):
        if comm.get_rank() == 0:
            assert intervals is None
        else:
            longest = max(i["time_end_ns"] - i["time_begin_ns"] for i in intervals)
            assert longest > LATE * 1e9
            assert intervals[0]["trigger"] == "DYNAMO"


@on_own_ranks(2, init=False)
@pytest.mark.parametrize("compiling", [True, False], ids=["compiles", "compiled before"])
def test_a_wait_has_its_own_timeout_where_a_rank_compiles(port, prefix, world, compiling):
    """The group's, of a minute, is no reason to wait long for a rank that compiled before."""
    from torch._dynamo.callback import CallbackTrigger, callback_handler

    comm, store = join("dist", (port, prefix), world, LIMIT)
    comm.set_timeout(datetime.timedelta(seconds=60))
    if comm.get_rank() == 1:
        with callback_handler.install_callbacks(CallbackTrigger.LAZY_BACKWARD, "0/0"):
            if compiling:
                store.set("compiled", "")
                time.sleep(LATE)  # being late is what is tested
        if compiling:
            return reduce(comm)
        store.set("compiled", "")
        store.wait(["raised"])
        return None
    store.wait(["compiled"])
    tensor = torch.ones(1000)
    work = comm.all_reduce(tensor, torchcomms_pg.ReduceOp.SUM, async_op=True)
    if compiling:
        work.wait(datetime.timedelta(seconds=LIMIT))
        assert tensor[0] == world
        return None
    with pytest.raises(torchcomms_pg.CommError, match="rank 1 has not arrived"):
        with time_limit(LIMIT * 0.9, 25, "wait(1 s)"):
            work.wait(datetime.timedelta(seconds=LIMIT))
    store.set("raised", "")
    return None


@on_own_ranks(2, init=False)
@pytest.mark.rotation
@pytest.mark.parametrize(
    "kind, how",
    [
        ("dist", {"timeout": 20}),
        ("gloo", {"timeout": datetime.timedelta(seconds=20)}),
        ("dist", {"minutes": 1}),
    ],
    ids=["dist, seconds", "gloo, timedelta", "dist, minutes"],
)
def test_relaxed_timeout_has_the_peers_wait_until_it_ends(port, prefix, world, kind, how):
    comm, store = join(kind, (port, prefix), world, LIMIT)
    if comm.get_rank() == 1:
        with comm.relaxed_timeout(**how):
            meet(store, "rank 1 is alone", world)
            time.sleep(LATE)  # being late is what is tested
            reduce(comm)
    else:
        meet(store, "rank 1 is alone", world)
        reduce(comm)
    meet(store, "rank 1 is back", world)
    if comm.get_rank() == 0:
        with pytest.raises(torchcomms_pg.CommError, match="(has not arrived|did not answer)"):
            with time_limit(LIMIT * 0.9, LIMIT + 10, "a deadline after it"):
                reduce(comm)
        store.set("done", "")
    else:
        store.wait(["done"])


@on_own_ranks(2, init=False)
def test_operations_issued_inside_may_take_that_long_and_contexts_nest(port, prefix, world):
    comm, store = join("dist", (port, prefix), world, LIMIT)
    if comm.get_rank() == 1:
        store.wait(["rank 0 may wait"])
        time.sleep(LATE)  # being late is what is tested
        reduce(comm)
    else:
        with comm.relaxed_timeout(20):
            with torchcomms_pg.get_comm().relaxed_timeout(0.01):
                pass
            store.set("rank 0 may wait", "")
            reduce(comm)


@pytest.mark.parametrize("given", [{}, {"timeout": 0}, {"timeout": -1.0}])
def test_a_time_that_is_none_is_refused(given):
    options = {"rank": 0, "size": 1, "store": dist.HashStore()}
    comm = torchcomms_pg.new_comm("shm", "cpu", "alone", **options)
    with pytest.raises(ValueError, match="relaxed_timeout"):
        with comm.relaxed_timeout(**given):
            pass
    comm.finalize()


SCRIPT = """
import sys, torch, torchcomms_pg
from torchcomms_pg import _C
from torchcomms_pg.diagnosis import compile_watch
compile_watch.configure()
compile_watch.configure()
assert "torch._dynamo" not in sys.modules, "torchcomms_pg imports torch._dynamo"
assert "compiling" not in _C.Recorder(1, False).json(True)
from torch._dynamo.callback import CallbackTrigger, callback_handler
both = callback_handler.start_callbacks, callback_handler.end_callbacks
assert [len(callbacks) for callbacks in both] == [1, 1]
with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/0"):
    pass
assert '"trigger": "DYNAMO"' in _C.Recorder(1, False).json(True)

compile_watch.configure()
callback_handler.register_start_callback(print)
torch._dynamo.reset()
compile_watch.configure()
torch._dynamo.reset()
assert [len(callbacks) for callbacks in both] == [1, 1]  # print is not called any more
before = _C.Recorder(1, False).json(True).count("time_end_ns")
with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/0"):
    try:
        torch._dynamo.reset()
    except AssertionError:  # from torch: something compiles
        pass
    else:
        raise AssertionError("torch has changed")
assert _C.Recorder(1, False).json(True).count("time_end_ns") == before + 1
assert [len(callbacks) for callbacks in both] == [1, 1]
"""


OTHERS_RAISE = """
import torch, torchcomms_pg
from torchcomms_pg import _C
from torchcomms_pg.diagnosis import compile_watch
from torch._dynamo.callback import CallbackTrigger, callback_handler

def raises(args):
    raise KeyError("another's")

@callback_handler.register_START_callback
def other(args):
    raises(args)

compile_watch.configure()
try:
    with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/0"):
        pass
except KeyError:
    pass
(interval,) = json.loads(_C.Recorder(1, False).json(True))["compiling"]
assert interval["time_end_ns"] >= interval["time_begin_ns"] > 0, interval
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["start", "end"])
def test_a_compilation_ends_where_a_callback_of_others_raises(kind):
    done = run_python("-c", "import json\n" + OTHERS_RAISE.replace("START", kind))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_torchs_compiler_is_listened_to_when_it_is_imported_and_not_before():
    done = run_python("-c", SCRIPT)
    assert done.returncode == 0, done.stderr
