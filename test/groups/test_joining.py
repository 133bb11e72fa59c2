"""Groups that cannot be made: who is at fault is told to all, and soon."""

import ctypes
import datetime
import gc
import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from harness.leaks import descriptors
from harness.limits import grown
from harness.ranks import Ranks, check, connect_store, init_default_group, wait_for
from harness.scarcity import no_more_descriptors
from torchcomms_pg.testing.rank import report

pytestmark = [pytest.mark.beyond_gloo, pytest.mark.torch_version]
CLONE_NEWPID = 0x20000000
PR_SET_DUMPABLE, PR_SET_KEEPCAPS = 4, 8
HALF_AN_HOUR = datetime.timedelta(minutes=30)
LONG = 30  # seconds, of which no test takes more than a few
SOON = 20  # seconds on a busy machine, of which none is the group's timeout


def new_group_without(victim):
    """(text, ranks at fault, seconds) of the survivors' new_group."""
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(torchcomms_pg.CommError) as raised:
        dist.new_group(timeout=HALF_AN_HOUR)
    return str(raised.value), raised.value.ranks, time.monotonic() - begun


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_dead_during_new_group_is_named_by_all_survivors(victim):
    with Ranks(3) as ranks:
        ranks.start(new_group_without, victim)
        outcomes = ranks.wait()
        check([outcome for outcome in outcomes if outcome.rank != victim])
        for outcome in outcomes:
            if outcome.rank != victim:
                text, named, took = outcome.value
                assert re.search(rf"rank {victim} \(pid {ranks.pids[victim]}\) died", text), text
                assert named == [victim]
                assert took < grown(SOON)


def meet(args, came):
    """A communicator of three ranks, of whom nobody knows another yet."""
    rank = int(os.environ["RANK"])
    store = connect_store(*args)
    if rank != 1:
        report("here")
        store.wait([came], HALF_AN_HOUR)
        report("goes on")
    with pytest.raises(torchcomms_pg.CommError) as raised:
        torchcomms_pg.new_comm(
            "shm", "cpu", "met", store=store, rank=rank, size=3, timeout=HALF_AN_HOUR
        )
    return str(raised.value), raised.value.ranks


def test_a_rank_dead_after_it_has_joined_is_named_where_no_group_knew_it():
    with Ranks(3, init=False) as ranks:
        args = ranks.store_args()
        store = connect_store(*args)
        ranks.start(meet, args, "rank 1 is dead")
        for rank in (0, 2):
            ranks.wait_report(rank)
        said = [key for key in keys_of_rank_1() if wait_for(lambda: store.check([key]), 30)]
        assert said, "rank 1 has not said who it is"
        ranks.kill(1)
        assert ranks.exit_code(1) == -9
        store.set("rank 1 is dead", "")
        check(ranks.wait(ranks=[0, 2]))
        for outcome in ranks.wait(ranks=[0, 2]):
            text, named = outcome.value
            assert f"rank 1 (pid {ranks.pids[1]}) died" in text and named == [1]


def keys_of_rank_1():
    """Returns the keys of the store that rank 1 writes: csrc/connect/StoreRendezvous.cpp."""
    return ["torchcomm/met/torchcomms_pg/met/3/1/rank/1"]


def join_without_descriptors(culprit):
    store = dist.distributed_c10d._get_default_store()
    begun = time.monotonic()
    with pytest.raises(torchcomms_pg.CommError) as raised:
        if dist.get_rank() == culprit:
            with no_more_descriptors():
                torchcomms_pg.new_comm("shm", "cpu", "poor", **place(store))
        torchcomms_pg.new_comm("shm", "cpu", "poor", **place(store))
    took = time.monotonic() - begun
    comm = torchcomms_pg.new_comm("shm", "cpu", "again", **place(store))
    comm.barrier(False)
    comm.finalize()
    return str(raised.value), raised.value.ranks, took


def place(store):
    world = dist.get_world_size()
    return {"store": store, "rank": dist.get_rank(), "size": world, "timeout": HALF_AN_HOUR}


@pytest.mark.parametrize("culprit", [0, 1])
def test_the_reason_of_a_rank_that_cannot_join_is_in_the_error_of_all(culprit):
    with Ranks(3) as ranks:
        for rank, (text, named, took) in enumerate(ranks.run(join_without_descriptors, culprit)):
            assert "Too many open files" in text, text
            if rank != culprit:
                assert f"rank {culprit} cannot join" in text and named == [culprit], text
            assert took < grown(SOON)


def try_once(backend, store, seconds, name="tried"):
    """A communicator that works; None: not all ranks came in time."""
    limit = datetime.timedelta(seconds=seconds)
    rank, size = dist.get_rank(), dist.get_world_size()
    try:
        comm = torchcomms_pg.new_comm(
            backend, "cpu", name, store=store, rank=rank, size=size, timeout=limit
        )
    except torchcomms_pg.CommError as error:
        assert f"within {seconds} s" in str(error), error
        return None, error
    got = [None] * size
    comm.all_gather_object(got, rank)
    assert got == list(range(size))
    return comm, None


def try_again(backend, late):
    """One rank comes when all others have given up, and try again; twice."""
    store, me = dist.distributed_c10d._get_default_store(), dist.get_rank()
    for _ in range(2):
        if me != late:
            comm, error = try_once(backend, store, 1)
            assert comm is None and late in error.ranks, error
        dist.barrier()
        comm, error = try_once(backend, store, LONG)
        assert comm is not None, error
        comm.finalize()
        comm, error = try_once(backend, store, LONG)  # the next of the name
        assert comm is not None, error
        comm.finalize()


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_rank_that_tries_again_meets_the_first_try_of_a_late_one(backend, late):
    with Ranks(3) as ranks:
        ranks.run(try_again, backend, late)


def wait_on(backend, patient):
    """Rank 1 gives up and tries again while another still waits; the last comes after that."""
    store, me = dist.distributed_c10d._get_default_store(), dist.get_rank()
    if me == 1:
        store.wait(["the patient one waits"])
        comm, error = try_once(backend, store, 1)
        assert comm is None and error.ranks == [2 - patient], error
        store.set("rank 1 has given up", "")
    elif me == patient:
        store.set("the patient one waits", "")
    else:
        store.wait(["rank 1 has given up"])
    comm, error = try_once(backend, store, LONG)
    assert comm is not None, error
    comm.finalize()


@pytest.mark.parametrize("patient", [0, 2])
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_rank_that_still_waits_meets_one_that_tries_again(backend, patient):
    with Ranks(3) as ranks:
        ranks.run(wait_on, backend, patient)


def wait_for_one_that_gives_up(key):
    store, me = dist.distributed_c10d._get_default_store(), dist.get_rank()
    if me == 0:
        comm, error = try_once("shm", store, 6)
    elif me == 1:
        assert wait_for(lambda: store.check([key]), LONG)
        comm, error = try_once("shm", store, 1)
        store.set("rank 1 has given up", "")
    else:
        store.wait(["rank 1 has given up"])
        comm, error = try_once("shm", store, 8)
    assert comm is None
    return str(error), error.ranks


def test_a_rank_that_has_given_up_is_named_and_the_late_one_is_not():
    key = "torchcomm/tried/torchcomms_pg/tried/3/1/rank/0"  # rank 0's, in StoreRendezvous.cpp
    with Ranks(3) as ranks:
        outcomes = ranks.run(wait_for_one_that_gives_up, key)
        assert [named for _, named in outcomes] == [[1], [2], [1]], outcomes
        assert "rank 1 gave up waiting before all ranks had come" in outcomes[0][0]


def join_beside_an_empty_value(key):
    """Another program has written an empty value under a key of the rendezvous."""
    store = dist.distributed_c10d._get_default_store()
    store.set(key, "")
    dist.barrier()
    with pytest.raises(torchcomms_pg.CommError) as raised:
        torchcomms_pg.new_comm("shm", "cpu", "tried", **place(store))
    return str(raised.value)


def test_an_empty_value_in_the_store_is_an_error_with_its_key():
    key = "torchcomm/tried/torchcomms_pg/tried/2/1/answer"
    with Ranks(2) as ranks:
        for text in ranks.run(join_beside_an_empty_value, key):
            assert "the store's key 'torchcomms_pg/tried/2/1/answer' is empty" in text, text


def fail_and_try_again(culprit):
    """The culprit fails before the others come, and tries again before they do."""
    store, me = dist.distributed_c10d._get_default_store(), dist.get_rank()
    if me == culprit:
        with pytest.raises(torchcomms_pg.CommError), no_more_descriptors():
            torchcomms_pg.new_comm("shm", "cpu", "tried", **place(store))
        store.set("the culprit has failed", "")
    else:
        store.wait(["the culprit has failed"])
        with pytest.raises(torchcomms_pg.CommError, match=f"rank {culprit} cannot join"):
            torchcomms_pg.new_comm("shm", "cpu", "tried", **place(store))
    comm, error = try_once("shm", store, LONG)
    assert comm is not None, error
    comm.finalize()


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_could_not_join_tries_again_and_each_is_told_once(culprit):
    with Ranks(3) as ranks:
        ranks.run(fail_and_try_again, culprit)


def keys_of_groups(backend, groups):
    """The number of keys in a store before and after so many groups, of which each has a part."""
    shared, me, world = dist.distributed_c10d._get_default_store(), dist.get_rank(), 3
    server = me == 0 and dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if server:
        shared.set("port of the store", str(server.port))
    store = connect_store(int(shared.get("port of the store")), "groups")
    before = store.num_keys()
    dist.barrier()
    for number in range(groups):
        comm = torchcomms_pg.new_comm(
            backend, "cpu", f"group {number}", store=store, rank=me, size=world
        )
        part = comm.split([0, 2] if me != 1 else [1], f"part {number}")
        for each in (part, comm):
            each.barrier(False)
            each.finalize()
    dist.barrier()
    after = store.num_keys()
    dist.barrier()
    return before, after


@pytest.mark.parametrize("backend, of_connections", [("shm", 0), ("gloo", 3 + 2)])
def test_a_group_leaves_one_key_in_the_store_beside_those_of_gloos_connections(
    backend, of_connections
):
    """That of the last round in which its ranks met. Gloo's have one for each rank of a group."""
    with Ranks(3) as ranks:
        for before, after in ranks.run(keys_of_groups, backend, 5):
            beyond = after - before - 5 * (1 + of_connections)
            assert 0 <= beyond <= 3  # the job's own, if its host has looked for rings meanwhile


def join_as_another_user(culprit):
    store = dist.distributed_c10d._get_default_store()
    begun = time.monotonic()
    if dist.get_rank() == culprit:
        os.seteuid(65534)
    with pytest.raises(torchcomms_pg.CommError) as raised:
        torchcomms_pg.new_comm("shm", "cpu", "mixed", **place(store))
    return str(raised.value), raised.value.ranks, time.monotonic() - begun


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_of_another_user_is_in_the_error_of_all(culprit):
    """Who opens the other's memory is refused, and says so."""
    if os.geteuid() != 0:
        pytest.skip("takes a second user")
    with Ranks(3) as ranks:
        for rank, (text, named, took) in enumerate(ranks.run(join_as_another_user, culprit)):
            assert "the unique id was made by user" in text, text
            if rank == 0 or (culprit == 1 and rank == 2):  # these could have joined
                assert re.search(r"rank [12] cannot join", text) and named[0] in (1, 2), text
            assert took < grown(SOON)


def become_ordinary(dumpable, privileged=False):
    """Leaves root, who may look into every process."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_KEEPCAPS, int(privileged), 0, 0, 0)
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    prctl(PR_SET_DUMPABLE, int(dumpable), 0, 0, 0)
    return dist.distributed_c10d._get_default_store()


def share_undumpable(dumpable):
    me, world = dist.get_rank(), dist.get_world_size()
    store = become_ordinary(me in dumpable)
    for name in ("one", "two"):
        comm, error = try_once("shm", store, LONG, name)
        assert comm is not None, error
        window = comm.new_window(torch.zeros(world))
        for rank in range(world):
            window.put(torch.tensor([me + 1.0]), rank, me, False)
        comm.barrier(False)
        assert window.map_remote_tensor((me + 1) % world).tolist() == [1, 2, 3]
        comm.barrier(False)
        window.tensor_deregister()
        del window
        comm.finalize()
    gc.collect()
    return [name for name in descriptors().values() if "memfd" in name]


@pytest.mark.parametrize("dumpable", [[], [0], [1, 2]])
def test_processes_that_are_not_dumpable_share_memory(dumpable):
    if os.geteuid() != 0:
        pytest.skip("takes a second user")
    with Ranks(3) as ranks:
        for files in ranks.run(share_undumpable, dumpable):
            assert not files, files


def join_privileged(culprit):
    store = become_ordinary(True, dist.get_rank() == culprit)
    begun = time.monotonic()
    with pytest.raises(torchcomms_pg.CommError) as raised:
        torchcomms_pg.new_comm("shm", "cpu", "hidden", **place(store))
    return str(raised.value), time.monotonic() - begun


def test_a_process_that_the_system_keeps_from_the_others_is_told_why():
    if os.geteuid() != 0:
        pytest.skip("takes a second user")
    with Ranks(3) as ranks:
        for text, took in ranks.run(join_privileged, 0):
            assert "/fd/" in text and "same capabilities" in text and "backend 'gloo'" in text, text
            assert took < grown(SOON)


def operate_in_container(args):
    """Rank 1 is in a pid namespace of its own, with the same host name; None: it may not be."""
    rank = int(os.environ["RANK"])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if rank == 1:
        if ctypes.CDLL(None).unshare(CLONE_NEWPID) != 0:
            return None
        child = os.fork()  # the first process of the namespace
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    try:
        init_default_group(*args, rank, 2, 60)
        dist.all_reduce(tensor := torch.ones(1000))
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        over_gloo = not getattr(backend, "supports_window", False)  # torch has it from 2.14 on
        dist.destroy_process_group()
        worked = tensor.tolist() == [2] * 1000 and over_gloo
    except BaseException:
        worked = False
        if rank != 1:
            raise
    if rank == 1:
        os._exit(0 if worked else 1)
    return worked


def test_two_containers_of_one_host_name_go_over_gloo():
    if os.geteuid() != 0:
        pytest.skip("a pid namespace of its own needs root")
    with Ranks(2, init=False) as ranks:
        ranks.start(operate_in_container, ranks.store_args())
        first = ranks.wait(60, ranks=[1])[0]
        if first.ok and first.value is None:
            pytest.skip("this machine does not let a process have a pid namespace of its own")
        check([first, *ranks.wait(60, ranks=[0])])
        assert first.value and ranks.wait(60, ranks=[0])[0].value
