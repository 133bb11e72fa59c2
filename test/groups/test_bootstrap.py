"""How new_comm finds its rank, its peers and its options: arguments, stores, the environment."""

import datetime
import gc
import os
import re
import socket

import pytest
import torch
import torch.distributed as dist

from harness.comms import torchcomms
from harness.programs import run_python
from harness.ranks import Ranks, connect_store, time_limit

pytestmark = pytest.mark.beyond_gloo
LIMIT = datetime.timedelta(seconds=30)
LAUNCHER = re.compile("TORCHCOMM_|OMPI_|PMI_|PALS_|RANK$|WORLD_SIZE$|MASTER_")


@pytest.fixture
def bare(monkeypatch):
    """No launcher's variables."""
    for name in [name for name in os.environ if LAUNCHER.match(name)]:
        monkeypatch.delenv(name)
    return monkeypatch


def alone(backend="shm", **options):
    options.setdefault("store", dist.HashStore())
    return torchcomms().new_comm(backend, "cpu", **options)


@pytest.mark.parametrize(
    "rank, size",
    [
        ("TORCHCOMM_RANK", "TORCHCOMM_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
        ("PALS_RANKID", "PALS_SIZE"),
        ("RANK", "WORLD_SIZE"),
    ],
)
def test_launchers_variables(bare, rank, size):
    bare.setenv(rank, "0")
    with pytest.raises(ValueError, match=f"{rank} is set and {size} is not"):
        alone()
    bare.setenv(size, "1")
    comm = alone()
    assert (comm.get_rank(), comm.get_size()) == (0, 1)
    comm.finalize()
    bare.setenv(rank, "1")
    with pytest.raises(ValueError, match=f"{rank}=1 and {size}=1"):
        alone()
    bare.setenv(rank, "x")
    with pytest.raises(ValueError, match=f"{rank}='x'"):
        alone()


def test_arguments_come_first_and_own_variables_before_launchers(bare):
    from torchcomms_pg.bootstrap import find_ranks

    pairs = torchcomms().env.LAUNCHERS
    for i, (rank, size) in enumerate(reversed(pairs)):
        bare.setenv(rank, str(i))
        bare.setenv(size, "10")
        assert find_ranks(None, None) == (i, 10)
    assert find_ranks(3, 4) == (3, 4)


def test_what_is_missing_is_named(bare):
    with pytest.raises(ValueError, match="Pass rank= and size=, or start .* torchrun"):
        alone()
    with pytest.raises(ValueError, match="rank is given and size is not"):
        alone(rank=0)
    with pytest.raises(ValueError, match="rank is 2, wanted 0 to 1"):
        alone(rank=2, size=2)
    with pytest.raises(ValueError, match="size is 0"):
        alone(rank=0, size=0)
    with pytest.raises(ValueError, match="MASTER_ADDR and MASTER_PORT are not set"):
        alone(rank=0, size=2, store=None)
    bare.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(ValueError, match="and MASTER_PORT is not set"):
        alone(rank=0, size=2, store=None)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_missing_rank_is_named_at_the_timeout(bare, backend):
    with time_limit(0.5, 10, "new_comm"):
        with pytest.raises(torchcomms().CommError, match="rank 1 did not come"):
            alone(backend, rank=0, size=2, timeout=datetime.timedelta(seconds=1))


def test_a_rank_alone_needs_no_store(bare):
    comm = alone(rank=0, size=1, store=None)
    tensor = torch.ones(2)
    comm.all_reduce(tensor, torchcomms().ReduceOp.SUM, False)
    assert tensor.tolist() == [1, 1]
    comm.finalize()


def test_options_and_their_variables(bare):
    tc = torchcomms()
    comm = alone(rank=0, size=1)
    options = comm.get_options()
    assert options.timeout == datetime.timedelta(seconds=600)
    assert options.abort_process_on_timeout_or_error is True
    comm.finalize()
    bare.setenv("TORCHCOMM_TIMEOUT_SECONDS", "7.5")
    bare.setenv("TORCHCOMM_ABORT_ON_ERROR", "FALSE")
    comm = alone(rank=0, size=1)
    options = comm.get_options()
    assert options.timeout == datetime.timedelta(seconds=7.5)
    assert options.abort_process_on_timeout_or_error is False
    comm.finalize()
    given = tc.CommOptions(True, datetime.timedelta(seconds=3))
    comm = alone(rank=0, size=1, options=given, timeout=datetime.timedelta(seconds=4))
    options = comm.get_options()
    assert options.timeout == datetime.timedelta(seconds=4)
    assert options.abort_process_on_timeout_or_error is True
    comm.finalize()
    bare.setenv("TORCHCOMM_TIMEOUT_SECONDS", "-1")
    with pytest.raises(ValueError, match="TORCHCOMM_TIMEOUT_SECONDS='-1'"):
        alone(rank=0, size=1)
    bare.delenv("TORCHCOMM_TIMEOUT_SECONDS")
    bare.setenv("TORCHCOMM_ABORT_ON_ERROR", "maybe")
    with pytest.raises(ValueError, match="wanted true or false"):
        alone(rank=0, size=1)


def test_every_variable_is_listed():
    out = run_python("-m", "torchcomms_pg.env", TORCHCOMM_TIMEOUT_SECONDS="12").stdout
    assert "TORCHCOMM_TIMEOUT_SECONDS = 12" in out
    for variable in torchcomms().env.VARIABLES:
        assert f"{variable.name} " in out and variable.meaning in out


def meet():
    comms = [torchcomms().new_comm("auto", torch.device("cpu"), name) for name in ("a", "b")]
    for comm in comms:
        got = [None] * comm.get_size()
        comm.all_gather_object(got, comm.get_rank())
        assert got == list(range(comm.get_size()))
        comm.finalize()


def meet_in_sequence(args):
    """Rank 0 ends each communicator only when the others are on their way to the next."""
    rank, signals = int(os.environ["RANK"]), connect_store(*args)
    for turn in range(3):
        comm = torchcomms().new_comm("shm", "cpu", f"turn {turn}", timeout=LIMIT)
        comm.barrier(False)
        if rank == 0 and turn < 2:
            signals.wait([f"{other} goes on from {turn}" for other in (1, 2)])
        comm.finalize()
        del comm
        gc.collect()
        signals.set(f"{rank} goes on from {turn}", "")


def test_ranks_meet_for_one_communicator_after_another_without_a_launchers_store():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="3")
    with Ranks(3, init=False, env={**env, "TORCHELASTIC_USE_AGENT_STORE": "False"}) as ranks:
        ranks.run(meet_in_sequence, ranks.store_args())


def test_ranks_meet_where_the_launcher_says():
    # As under torchrun, the server is somebody else's.
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(server.port), WORLD_SIZE="3")
    with Ranks(3, init=False, env={**env, "TORCHELASTIC_USE_AGENT_STORE": "True"}) as ranks:
        ranks.run(meet)


@pytest.mark.ranks(3)
def test_file_store(world):
    path = [f"/tmp/torchcomms_pg-{os.getpid()}"]
    dist.broadcast_object_list(path, 0)
    rank = dist.get_rank()
    store = dist.FileStore(path[0], world)
    comm = torchcomms().new_comm("shm", "cpu", store=store, rank=rank, size=world)
    comm.barrier(False)
    comm.finalize()
    del comm, store  # the end of a FileStore writes once more, which would make the file again
    gc.collect()
    dist.barrier()
    if rank == 0 and os.path.exists(path[0]):
        os.unlink(path[0])


class StoreOfAnother(dist.Store):
    """Says in place of rank 0 what it answers: both ranks as rank 1 has told of itself, and ids."""

    def __init__(self, ids):
        super().__init__()
        self.ids = ids
        self.peer = None

    def add(self, key, value):
        return value

    def set(self, key, value):
        if self.peer is None:
            self.peer = bytes(value).removeprefix(b"=").partition(b"\n")[0] + b"\n"

    def check(self, keys):
        return self.peer is not None

    def wait(self, keys, timeout=None):
        pass

    def get(self, key):
        return b"=" + 2 * self.peer + self.ids


@pytest.mark.parametrize("ids", [0, 2, 3, 0.5], ids=lambda n: f"{n} ids")
def test_an_answer_that_is_not_one_unique_id_is_refused(bare, ids):
    with pytest.raises(torchcomms().CommError, match="is not a unique id as rank 1 wants"):
        alone(rank=1, size=2, store=StoreOfAnother(bytes(int(ids * 128))))


@pytest.mark.parametrize("said", [b"", b"x", b"=", b"=" + bytes(128), b"x" * 1000])
def test_an_answer_of_another_program_is_refused(bare, said):
    store = StoreOfAnother(b"")
    store.get = lambda key: said
    wrong = "bytes, is damaged" if said else "is empty: the ranks need a store that no other"
    with pytest.raises(torchcomms().CommError, match=wrong):
        alone(rank=1, size=2, store=store)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.ranks(2)
def test_names_of_any_length(world, backend):
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    name = "n" * 5000
    options = {"store": store, "rank": rank, "size": world}
    comms = [torchcomms().new_comm(backend, "cpu", name + end, **options) for end in ("a", "b")]
    comms.append(comms[0].split([0, 1], "s" * 5000))
    for comm in comms:
        got = [None] * world
        comm.all_gather_object(got, rank)
        assert got == [0, 1]
        comm.finalize()


class StoreOfOthers(dist.Store):
    """Says of the other ranks what `line` makes of the line that rank 0 has told of itself."""

    def __init__(self, line):
        super().__init__()
        self.line = line
        self.said = {}

    def add(self, key, value):
        return value

    def set(self, key, value):
        self.said[key.rpartition("/")[2]] = bytes(value)

    def check(self, keys):
        return not keys[0].endswith(("refused", "answer"))

    def get(self, key):
        kind, _, name = key.rpartition("/")
        if kind.endswith("rank") and name != "0":
            host, *rest = self.said["0"].decode().partition("\n")[0].split(" ")
            return (" ".join(self.line(host, *rest)) + "\n").encode()
        return self.said[name]


def test_other_versions_are_refused_with_their_ranks_and_hosts(bare):
    own = torchcomms().__version__
    store = StoreOfOthers(lambda host, *rest: ("=other", *rest[:-1], "0.0.9"))
    with pytest.raises(torchcomms().CommError) as raised:
        alone(rank=0, size=3, store=store)
    text = str(raised.value)
    assert f"rank 0 with torchcomms_pg '{own}' on host '" in text
    assert "ranks 1, 2 with torchcomms_pg '0.0.9' on host 'other'" in text
    assert "install the same version on all hosts" in text
    assert text.partition("set up: ")[2].encode() in store.said["answer"]  # so all ranks raise it


def test_more_ranks_of_a_host_than_can_share_memory_are_refused(bare):
    elsewhere = StoreOfOthers(lambda host, space, *rest: (host, "1-1", *rest))
    with pytest.raises(torchcomms().CommError, match="has more than 1024 ranks of the group"):
        alone(rank=0, size=1026, store=elsewhere)
    assert b"start fewer on it" in elsewhere.said["answer"]
