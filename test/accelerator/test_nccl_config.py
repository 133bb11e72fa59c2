"""What NCCL is told when it makes, splits and shrinks communicators.

A small libnccl made here (fake_nccl.py) carries the tensors of the simulated accelerator and
writes down what it is called with.
"""

import copy
import ctypes
import datetime
import os

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from accelerator.test_nccl_library import on_threads
from harness.fake_nccl import Library
from harness.ranks import wait_for
from torchcomms_pg import _C, nccl
from torchcomms_pg.registration import serve_host_device

try:
    import simulated

    simulated.install()
except ImportError:
    pytest.skip("python test/simulated/build.py builds it", allow_module_level=True)

DEVICE = "sim:0"
TIMEOUT = datetime.timedelta(seconds=20)
CONFIG = {"min_ctas": 2, "max_ctas": 16, "comm_name": "tensor parallel", "cta_policy": 1}
# The same, as the library has it.
TOLD = {"minCTAs": 2, "maxCTAs": 16, "commName": "tensor parallel", "CTAPolicy": 1}


@pytest.fixture
def serve(tmp_path):
    """Has the simulated accelerator served by a version of NCCL, which it gives."""

    def serving(version, *features):
        made = Library(tmp_path, version, *features)
        serve_host_device("sim", made.path)
        return made

    yield serving
    serve_host_device("sim")


@pytest.fixture
def library(serve):
    return serve(22809, "SCALABLE", "SHRINK")


def new_comms(size, **arguments):
    """The communicators of as many threads, or what they raised."""
    store = dist.HashStore()
    make = lambda rank: torchcomms_pg.new_comm(  # noqa: E731
        *("nccl", DEVICE),
        **dict(store=store, rank=rank, size=size, timeout=TIMEOUT),
        abort_process_on_timeout_or_error=False,
        **arguments,
    )
    return joined(on_threads(size, make), torchcomms_pg.TorchComm.get_nccl_comm_ptr)


def joined(made, pointer):
    """`made`, once the library has the communicators of all that are not errors."""
    for one in made:
        if not isinstance(one, Exception):
            pointer(one)
    return made


def new_backends(size, device=DEVICE, **config):
    """Backends of as many threads, connected for the device."""
    store = dist.HashStore()

    def make(rank):
        options = torchcomms_pg.Backend.Options(TIMEOUT)
        for name, value in config.items():
            setattr(options.config, name, value)
        backend = torchcomms_pg.Backend(store, rank, size, options)
        if device:
            backend.eager_connect_single_device(torch.device(device))
        return backend

    backends = on_threads(size, make)
    assert all(isinstance(backend, torchcomms_pg.Backend) for backend in backends), backends
    return store, joined(backends, lambda backend: device and backend.comm_ptr)


# ---------------------------------------------------------------- what a version lacks


@pytest.mark.parametrize("version, refused", [(22304, True), (22403, False)])
def test_float8_is_not_reduced_by_an_nccl_that_has_no_such_type(serve, version, refused):
    library = serve(version, "SCALABLE")
    _, (backend,) = new_backends(1)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        tensor = torch.ones(4).to(dtype).to(DEVICE)
        if refused:
            says = r"all_reduce: reduce op SUM of Float8_\w+ tensors takes NCCL 2.24.0 or later, "
            with pytest.raises(RuntimeError, match=says + "and the loaded library is 2.23.4; conv"):
                backend.allreduce([tensor])
        else:
            backend.allreduce([tensor]).wait()
    assert len(library.calls("all_reduce")) == (0 if refused else 2)
    backend.shutdown()


# ---------------------------------------------------------------- the configuration


@pytest.mark.parametrize(
    "hints",
    [
        CONFIG,
        TOLD,
        {f"torchcomm::nccl::{name}": value for name, value in TOLD.items()},
    ],
    ids=("torch's names", "NCCL's names", "with the prefix"),
)
def test_hints_of_a_communicator_reach_the_library(library, hints):
    comms = new_comms(2, hints={name: str(value) for name, value in hints.items()})
    assert library.configs("init") == [TOLD, TOLD]
    for comm in comms:
        comm.finalize()


def test_nothing_is_set_that_was_not_asked_for(library):
    for comm in new_comms(1):
        assert comm.get_backend_version() == "2.28.9"
        comm.finalize()
    assert library.configs("init") == [{}]


@pytest.mark.torch_version
def test_options_of_a_process_group_reach_the_library(library):
    _, backends = new_backends(2, **CONFIG, net_name="Socket", split_share=1)
    assert library.configs("init") == [{**TOLD, "netName": "Socket", "splitShare": 1}] * 2
    for backend in backends:
        backend.shutdown()


def test_a_split_communicator_has_its_parents_configuration_or_that_of_its_hints(library):
    comms = new_comms(2, hints={"minCTAs": "2", "maxCTAs": "16"})
    same = on_threads(2, lambda rank: comms[rank].split([0, 1]))
    other = on_threads(2, lambda rank: comms[rank].split([0, 1], hints={"maxCTAs": "3"}))
    parents = {"minCTAs": 2, "maxCTAs": 16}
    assert library.configs("split") == [parents, parents, {"maxCTAs": 3}, {"maxCTAs": 3}]
    for child in (*same, *other):
        assert child.get_size() == 2
        child.finalize()
    for comm in comms:
        comm.finalize()


@pytest.mark.torch_version
def test_ranks_outside_a_split_take_part_without_a_color(library):
    comms = new_comms(3)
    made = on_threads(3, lambda rank: comms[rank].split([0, 2] if rank != 1 else []))
    assert made[1] is None and made[0].get_size() == made[2].get_size() == 2
    assert sorted((call["rank"], call["made"]) for call in library.calls("split")) == [
        (0, True),
        (1, False),
        (2, True),
    ]
    for comm in (made[0], made[2], *comms):
        comm.finalize()


@pytest.mark.torch_version
@pytest.mark.skipif(not hasattr(dist, "shrink_group"), reason="torch has it from 2.12 on")
def test_a_shrunk_group_has_its_parents_configuration_for_the_accelerator_too(library):
    _, backends = new_backends(3, **CONFIG)
    children = on_threads(2, lambda rank: backends[rank].shrink([2]))
    assert library.configs("shrink") == [TOLD, TOLD]
    for child in children:
        assert child.size() == 2
        assert child.options.config.min_ctas == 2
        assert child.comm_ptr != 0  # of the shrunk communicator, which nobody had to make
        child.shutdown()
    assert len(library.calls("init")) == 3
    for backend in backends:
        backend.shutdown()


def test_shrinking_with_a_library_that_cannot_names_the_version(serve):
    serve(22506)
    _, backends = new_backends(2)
    (error,) = on_threads(1, lambda rank: backends[rank].shrink([1]))
    assert "shrink: the loaded NCCL lacks it; it came with NCCL 2.27.3" in str(error)
    for backend in backends:
        backend.shutdown()


@pytest.mark.skipif(not hasattr(dist, "shrink_group"), reason="torch has it from 2.12 on")
def test_a_revoked_communicator_can_be_shrunk(serve):
    library = serve(22809, "SHRINK", "REVOKE")
    _, backends = new_backends(2)
    on_threads(2, lambda rank: backends[rank].abort())
    flag = dist.distributed_c10d.SHRINK_ABORT
    (child,) = on_threads(1, lambda rank: backends[rank].shrink([1], flag))
    assert child.comm_ptr and library.calls("abort") == []
    for backend in (child, *backends):
        backend.shutdown()


def test_options_are_copied_with_their_configuration():
    options = torchcomms_pg.Backend.Options()
    for name, value in CONFIG.items():
        setattr(options.config, name, value)
    for copied in (copy.copy(options), copy.deepcopy(options)):
        assert {name: getattr(copied.config, name) for name in CONFIG} == CONFIG
        copied.config.min_ctas = 5
    assert options.config.min_ctas == 2


@pytest.mark.torch_version
@pytest.mark.skipif(
    not hasattr(torchcomms_pg.Backend, "merge"), reason="torch binds split and merge from 2.14 on"
)
def test_groups_that_are_made_of_one_have_its_options_for_themselves():
    store, backends = new_backends(2, device=None, **CONFIG)
    options = backends[0].options

    def children(rank):
        split = backends[rank].split(dist.PrefixStore("s", store), [0, 1], options)
        merged = backends[rank].merge(dist.PrefixStore("m", store), options, rank, 2)
        return split, merged

    for made in on_threads(2, children):
        for child in made:
            assert child.options.config.comm_name == "tensor parallel"
            child.options.config.comm_name = "of a child"
            child.shutdown()
    assert options.config.comm_name == "tensor parallel"
    for backend in backends:
        backend.shutdown()


@pytest.mark.parametrize(
    "name, value, error, says",
    [
        ("min_ctas", 0, ValueError, "config.min_ctas is 0, wanted 1 or more, or None"),
        ("cga_cluster_size", 9, ValueError, "config.cga_cluster_size is 9, wanted 0 to 8"),
        ("split_share", 2, ValueError, "config.split_share is 2, wanted 0 or 1"),
        ("max_ctas", "8", TypeError, "config.max_ctas is '8', wanted an int, or None"),
        ("net_name", 8, TypeError, "config.net_name is 8, wanted a str, or None"),
        ("comm_name", "", ValueError, "config.comm_name is empty"),
        ("blocking", 2, ValueError, "config.blocking is 2, wanted 0 or 1, or None"),
    ],
)
def test_a_value_that_nccl_would_refuse_is_refused_when_it_is_set(name, value, error, says):
    config = torchcomms_pg.NcclConfig()
    with pytest.raises(error, match=says):
        setattr(config, name, value)
    assert getattr(config, name) is None


def test_what_is_set_can_be_left_to_nccl_again():
    config = torchcomms_pg.NcclConfig()
    config.blocking, config.max_ctas, config.net_name = 0, 4, "Socket"
    assert (config.blocking, config.max_ctas, config.net_name) == (0, 4, "Socket")
    config.max_ctas = config.net_name = None
    assert (config.max_ctas, config.net_name) == (None, None)


@pytest.mark.skipif(_C.nccl_header_version >= 23203, reason="this header has all fields")
def test_a_field_that_the_header_lacks_is_refused_by_name():
    with pytest.raises(ValueError, match=r"nvls_host_mode came with NCCL 2\.32\.3.*nccl\.h of 2\."):
        torchcomms_pg.NcclConfig().nvls_host_mode = 1


@pytest.mark.parametrize(
    "hints, says",
    [
        ({"minCTAs": "two"}, "hint minCTAs is 'two': invalid literal"),
        ({"torchcomm::nccl::splitShare": "2"}, "splitShare is '2': config.split_share is 2"),
        ({"blocking": "2"}, "hint blocking is '2': config.blocking is 2, wanted 0 or 1"),
        ({"maxCTAs": "1", "max_ctas": "2"}, "hints maxCTAs and max_ctas are the same"),
    ],
)
def test_a_wrong_hint_is_refused_before_anybody_meets(hints, says):
    with pytest.raises(ValueError, match=says):
        torchcomms_pg.new_comm("nccl", DEVICE, store=dist.HashStore(), rank=0, size=2, hints=hints)


@pytest.mark.parametrize(
    "config, says",
    [
        ({"min_ctas": 4}, "min_ctas is 4 and config.max_ctas None.*set both"),
        ({"min_ctas": 4, "max_ctas": 2}, "min_ctas is 4 and config.max_ctas 2.*set both"),
    ],
)
def test_numbers_that_do_not_go_together_are_refused_before_the_library_sees_them(
    library, config, says
):
    (error,) = new_comms(1, hints={name: str(value) for name, value in config.items()})
    with pytest.raises(ValueError, match=says):
        raise error
    assert library.calls("init") == []


def test_what_an_older_library_would_ignore_is_refused_by_name(serve):
    library = serve(22605)
    (error,) = new_comms(1, hints={"comm_name": "x"})
    with pytest.raises(RuntimeError, match=r"comm_name came with NCCL 2\.27\.3.* is 2\.26\.5"):
        raise error
    assert library.calls("init") == []


@pytest.mark.parametrize("version, told", [(22809, {"commName": "tensor parallel"}), (22605, {})])
def test_a_communicators_name_reaches_a_library_that_takes_it(serve, version, told):
    library = serve(version)
    comms = new_comms(2, name="tensor parallel")
    assert library.configs("init") == [told, told]
    assert [comm.get_name() for comm in comms] == ["tensor parallel"] * 2
    children = on_threads(2, lambda rank: comms[rank].split([0, 1]))
    children += on_threads(2, lambda rank: comms[rank].split([0, 1], "half"))
    own = {"commName": "half"} if told else {}
    assert library.configs("split") == [told, told, own, own]
    for comm in (*children, *comms):
        comm.finalize()


def test_a_hint_goes_before_the_communicators_name(library):
    for comm in new_comms(1, name="mine", hints={"commName": "NCCL's"}):
        (child,) = on_threads(1, lambda rank: comm.split([0], "half", {"comm_name": "other"}))
        child.finalize()
        comm.finalize()
    assert library.configs("init") == [{"commName": "NCCL's"}]
    assert library.configs("split") == [{"commName": "other"}]


@pytest.mark.parametrize("algorithms, told", [(None, "^NVLS"), ("Ring", "Ring")])
def test_deterministic_algorithms_exclude_nvls(library, monkeypatch, algorithms, told):
    monkeypatch.setenv("NCCL_ALGO", algorithms or "")
    for comm in new_comms(1):
        assert os.environ["NCCL_ALGO"] == (algorithms or "")
        comm.finalize()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    for comm in new_comms(1):
        assert os.environ["NCCL_ALGO"] == told
        comm.finalize()


# ---------------------------------------------------------------- several unique ids


def meet(library, size, *ranks_per_root):
    """What the ranks agree on; they are told in turn for how many ranks one id is."""
    store, loaded = dist.HashStore(), nccl.load(library.path)

    def join(rank):
        ctypes.CDLL(library.path).fakeRank(rank)
        each = ranks_per_root[rank % len(ranks_per_root)]
        return _C.meet_over_nccl(loaded, store, rank, size, "g", TIMEOUT, each)

    return on_threads(size, join)


@pytest.mark.parametrize(
    "size, ranks_per_root, roots",
    [(3, 128, [0]), (3, 3, [0]), (3, 2, [0, 2]), (3, 1, [0, 1, 2]), (7, 3, [0, 3, 5])],
)
def test_large_groups_start_from_several_ids_made_by_their_roots(
    library, size, ranks_per_root, roots
):
    ids = meet(library, size, ranks_per_root)
    assert all(each == ids[0] for each in ids)
    makers = [int(each.split(b"\0")[0].rsplit(b" ", 1)[1]) for each in ids[0]]
    assert makers == roots


def test_a_library_that_starts_from_one_id_gets_one(tmp_path):
    ids = meet(Library(tmp_path, 22105), 3, 1)
    assert [len(each) for each in ids] == [1, 1, 1] and ids[0] == ids[1] == ids[2]


def test_ranks_that_differ_in_the_number_of_ids_get_an_error(library):
    for error in meet(library, 3, 1, 128):  # rank 1 alone would make none
        assert isinstance(error, torchcomms_pg.CommError)
        assert "rank 1 made no unique id; TORCH_NCCL_RANKS_PER_ROOT" in str(error)


@pytest.mark.parametrize("ranks_per_root, call", [("2", "scalable"), ("3", "init")])
def test_every_rank_gives_the_library_the_same_ids(library, monkeypatch, ranks_per_root, call):
    monkeypatch.setenv("TORCH_NCCL_RANKS_PER_ROOT", ranks_per_root)
    for comm in new_comms(3):
        comm.finalize()
    assert len(library.calls("init")) + len(library.calls("scalable")) == 3
    calls = library.calls(call)
    assert sorted(each["rank"] for each in calls) == [0, 1, 2]
    assert len(calls[0]["ids"]) == len(set(calls[0]["ids"])) == (2 if call == "scalable" else 1)
    assert all(each["ids"] == calls[0]["ids"] and each["size"] == 3 for each in calls)


def test_ranks_per_root_of_zero_is_refused(monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_RANKS_PER_ROOT", "0")
    with pytest.raises(ValueError, match="TORCH_NCCL_RANKS_PER_ROOT=0: wanted 1 or more"):
        torchcomms_pg.env.ranks_per_root()


# ---------------------------------------------------------------- the communicator itself


@pytest.mark.torch_version
def test_the_pointer_of_a_group_is_nccls_communicator(library):
    _, backends = new_backends(2)
    made = {call["rank"]: call["comm"] for call in library.calls("init")}
    for backend in backends:
        assert backend._comm_ptr() == backend.comm_ptr == made[backend.rank()]
        backend.shutdown()


def test_the_pointer_of_several_devices_is_that_of_the_current_one(library):
    (backend,) = new_backends(1)[1]
    backend.eager_connect_single_device(torch.device("sim:1"))
    with torch.sim.device(1):
        assert backend.comm_ptr  # when the library has made it
    first, second = (call["comm"] for call in library.calls("init"))
    for index, pointer in enumerate((first, second)):
        with torch.sim.device(index):
            assert backend.comm_ptr == pointer
    backend.shutdown()


def test_a_group_without_an_accelerator_has_no_pointer():
    (backend,) = new_backends(1, device=None)[1]
    with pytest.raises(RuntimeError, match="comm_ptr: .* no communicator .* device_id"):
        backend._comm_ptr()
    backend.shutdown()


def test_the_pointer_of_a_communicator_is_nccls(library):
    (comm,) = new_comms(1)
    assert comm.get_nccl_comm_ptr() == library.calls("init")[0]["comm"]
    comm.finalize()
    with pytest.raises(RuntimeError, match="finalize"):
        comm.get_nccl_comm_ptr()
    other = torchcomms_pg.new_comm("shm", "cpu", rank=0, size=1, store=dist.HashStore())
    with pytest.raises(RuntimeError, match="get_nccl_comm_ptr: .* 'shm', .* only 'nccl' has"):
        other.get_nccl_comm_ptr()
    other.finalize()


@pytest.mark.torch_version
def test_a_backend_has_what_torchs_own_has():
    _, (first, second) = new_backends(2, device=None)
    assert first.uid != second.uid
    assert first._is_initialized()
    first._set_default_timeout(datetime.timedelta(seconds=7))
    assert first.options._timeout == datetime.timedelta(seconds=7)
    for backend in (first, second):
        backend.perform_nocolor_split(torch.device("cpu"))
        backend.shutdown()


def test_a_backend_is_initialized_when_all_of_its_communicators_are(library):
    _, (backend,) = new_backends(1, device=None)
    assert backend._is_initialized()  # that of CPU tensors
    library.functions.fakeHang(True)
    try:
        backend.eager_connect_single_device(torch.device(DEVICE))
        assert not backend._is_initialized()
    finally:
        library.functions.fakeHang(False)
    assert wait_for(backend._is_initialized, 20)
    backend.shutdown()
