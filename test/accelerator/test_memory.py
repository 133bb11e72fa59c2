"""Memory of a group: pools that are registered with NCCL, and memory that NCCL gives back.

Over a library that only keeps a record (fake_nccl.py), on the simulated accelerator: what NCCL
makes of the calls, only a GPU shows (tools/gpu_check). What old libraries and other groups cannot
do is refused with what it would take.
"""

import ctypes
import os
import tempfile
import threading

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
import torchcomms_pg.memory
from accelerator.test_nccl_library import REQUIRED, make_library
from harness import fake_nccl
from harness.fake_nccl import Library
from harness.ranks import (
    Ranks,
    init_default_group,
    on_own_ranks,
    on_ranks,
    time_limit,
    wait_for,
)
from torchcomms_pg import _C, nccl
from torchcomms_pg.registration import serve_host_device

pytestmark = pytest.mark.torch_version

DEVICE = "sim:0"

try:
    import simulated
    from simulated import hold
except ImportError:
    pytest.skip("python test/simulated/build.py builds it", allow_module_level=True)


class Pool:
    """As a torch.cuda.MemPool, of segments (address, bytes)."""

    id = (0, 7)

    def __init__(self, *segments):
        self.segments = segments

    def snapshot(self):
        return [{"device": 0, "address": at, "total_size": size} for at, size in self.segments]


library = None


def over_fake(port, prefix, world, timeout, joins=True):
    global library
    simulated.install()
    library = Library(tempfile.mkdtemp(dir=fake_nccl.FOLDER), 23007, "MEMORY")
    serve_host_device("sim", library.path)
    init_default_group(port, prefix, 0, 1, timeout)
    if joins:
        torchcomms_pg.get_comm(device=DEVICE).get_nccl_comm_ptr()  # when the library has made it
        library.latest()


def over_shared_memory(port, prefix, world, timeout):
    simulated.install()
    serve_host_device("sim")
    init_default_group(port, prefix, int(os.environ["RANK"]), world, timeout)


def backend():
    return dist.group.WORLD._get_backend(torch.device(DEVICE))


on_recorder = on_ranks(1, init=over_fake)

A, B = 4096, 8192  # addresses, which nobody looks at


# ---------------------------------------------------------------- pools


@on_recorder
def test_a_pool_is_registered_once_with_what_it_has_and_deregistered(world):
    pool = Pool((A, 10), (B, 20))
    backend().register_mem_pool(pool)
    backend().register_mem_pool(pool)
    assert library.latest() == [f"register:{A}:10", f"register:{B}:20"]
    pool.segments += ((3 * A, 30),)
    backend().register_mem_pool(pool)
    assert library.latest() == [f"register:{3 * A}:30"]
    backend().deregister_mem_pool(pool)
    assert library.latest() == [f"deregister:{at}" for at in (A, B, 3 * A)]
    with pytest.raises(ValueError, match=r"pool \(0, 7\) is not registered with group"):
        backend().deregister_mem_pool(pool)


@on_recorder
def test_symmetric_memory_is_registered_as_a_window(world):
    backend().register_mem_pool(Pool((A, 10)), symm=True)
    assert library.latest() == [f"window:{A}:10:1"]  # NCCL_WIN_COLL_SYMMETRIC
    backend().deregister_mem_pool(Pool())
    assert library.latest() == [f"no_window:{A}"]


@on_recorder
def test_a_pool_without_memory_is_told_of(world):
    with pytest.warns(UserWarning, match="the pool has no memory yet.*call it again"):
        backend().register_mem_pool(Pool())


@on_recorder
def test_what_the_library_refuses_to_register_is_an_error_with_its_reason(world):
    library.functions.fakeRefuse(5)
    with pytest.raises(torchcomms_pg.CommError, match="register_mem_pool.*manager is disabled"):
        backend().register_mem_pool(Pool((A, 10)), symm=True)
    library.functions.fakeRefuse(0)
    library.latest()
    backend().deregister_mem_pool(Pool())
    assert library.latest() == []


@on_own_ranks(1, init=over_fake)
def test_the_end_of_the_group_deregisters_its_pools_first():
    backend().register_mem_pool(Pool((A, 10)))
    library.latest()
    dist.destroy_process_group()
    assert library.latest() == [f"deregister:{A}", "finalize", "destroy"]


def test_an_allocator_is_refused_of_a_library_that_has_none(tmp_path):
    old = nccl.load(make_library(tmp_path, 21805, REQUIRED))
    with pytest.raises(RuntimeError, match=r"NCCL 2\.18\.5 at .* has no allocator.*2\.19\.3"):
        _C.allocate_with(old)


def allocate_with_two(path):
    options = torchcomms_pg.Backend.Options()
    options.nccl_library = library.path
    first = torchcomms_pg.memory.allocator(options)
    assert torchcomms_pg.memory.allocator(options) is first
    options.nccl_library = path
    with pytest.raises(RuntimeError, match=rf"allocates with NCCL 2\.30\.7 at {library.path}"):
        torchcomms_pg.memory.allocator(options)


@pytest.mark.skipif(not hasattr(torch._C, "_cuda_customAllocator"), reason="torch is for CPUs")
def test_one_library_allocates_for_the_whole_process(tmp_path):
    other = make_library(tmp_path, 22105, [*REQUIRED, "ncclMemAlloc", "ncclMemFree"])
    with Ranks(1, init=over_fake) as ranks:
        ranks.run(allocate_with_two, other)


@pytest.mark.skipif(hasattr(torch._C, "_cuda_customAllocator"), reason="torch is for GPUs")
def test_a_torch_for_cpus_has_no_pools():
    with pytest.raises(NotImplementedError, match="built for CPUs only"):
        torchcomms_pg.memory.allocator(torchcomms_pg.Backend.Options())


@pytest.mark.ranks(2)
def test_tensors_of_cpus_are_not_allocated_by_the_group(world):
    cpu = torch.device("cpu")
    group = dist.group.WORLD._get_backend(cpu)
    assert not group.supports_tensor_alloc(cpu)
    with pytest.raises(ValueError, match="device is cpu, wanted a GPU"):
        group.allocate_tensor(10, dtype=torch.float32, device=cpu)


# ---------------------------------------------------------------- suspended


@on_recorder
def test_a_suspended_group_refuses_operations_until_it_is_resumed(world):
    tensor = torch.ones(4, device=DEVICE)
    assert backend().memory_stats() == {
        "suspend": 1000,
        "suspended": 0,
        "persist": 1002,
        "total": 1003,
    }
    backend().suspend()
    assert backend().memory_stats()["suspended"] == 1
    for call in (
        lambda: dist.all_reduce(tensor),
        lambda: dist.all_reduce(tensor, async_op=True),
        lambda: backend().register_mem_pool(Pool((A, 10))),
    ):
        with pytest.raises(RuntimeError, match=r"is suspended; call resume\(\)"):
            call()
    with pytest.raises(RuntimeError, match=r"is suspended already"):
        backend().suspend()
    assert library.latest() == ["suspend:1"]
    dist.all_reduce(torch.ones(4))  # of the CPU
    backend().resume()
    assert backend().memory_stats()["suspended"] == 0
    dist.all_reduce(tensor)
    assert library.latest() == ["resume", "all_reduce"]
    with pytest.raises(RuntimeError, match="is not suspended"):
        backend().resume()


@on_recorder
def test_suspending_waits_for_what_is_in_flight(world):
    tensor = torch.ones(4, device=DEVICE)
    suspending = threading.Thread(target=backend().suspend)
    with hold():
        work = dist.all_reduce(tensor, async_op=True)
        suspending.start()
        # From its begin on, nothing new comes in.
        assert wait_for(refuses_operations)
        early = simulated.early_queries()[1]
        assert wait_for(lambda: simulated.early_queries()[1] >= early + 5)  # its end is asked for
        assert library.latest().count("suspend:1") == 0
    suspending.join()
    assert work.is_completed()
    assert library.latest()[-1] == "suspend:1"
    backend().resume()


def refuses_operations():
    try:
        dist.all_reduce(torch.ones(4, device=DEVICE))
    except RuntimeError as error:
        return "is suspended" in str(error)
    return False


@on_recorder
def test_a_library_that_refuses_to_suspend_leaves_the_group_usable(world):
    library.functions.fakeRefuse(5)
    with pytest.raises(torchcomms_pg.CommError, match="suspend .*memory manager is disabled"):
        backend().suspend()
    with pytest.raises(RuntimeError, match="memory_stats: .*failed.*manager is disabled"):
        backend().memory_stats()
    library.functions.fakeRefuse(0)
    dist.all_reduce(torch.ones(4, device=DEVICE))


@on_own_ranks(1, init=over_fake, group_timeout=2)
def test_suspending_has_the_timeout_of_an_operation():
    library.functions.fakeHang(True)
    with time_limit(1, 25, "suspending"):
        with pytest.raises(torchcomms_pg.CommError, match="suspend .*timed out"):
            backend().suspend()


@on_ranks(2, init=over_shared_memory)
def test_a_library_that_cannot_suspend_is_told_of_with_the_version_that_can(world):
    for call in (backend().suspend, backend().memory_stats):
        with pytest.raises(RuntimeError, match="no connections for an accelerator"):
            call()
    torchcomms_pg.get_comm(device=DEVICE)
    for call in (backend().suspend, backend().resume, backend().memory_stats):
        with pytest.raises(NotImplementedError, match=r"has no ncclComm\w+, .* NCCL 2\.29\.7"):
            call()
    dist.all_reduce(torch.ones(4, device=DEVICE))


# ---------------------------------------------------------------- registrations


def allocation():
    """The functions by which torch takes memory and gives it back, and a segment taken."""
    _C.allocate_with(nccl.load(library.path))
    functions = ctypes.CDLL(_C.__file__)
    functions.torchcomms_pg_allocate.restype = ctypes.c_void_p
    return functions, functions.torchcomms_pg_allocate(ctypes.c_size_t(64), 0, None)


def free(functions, at):
    functions.torchcomms_pg_free(ctypes.c_void_p(at), ctypes.c_size_t(64), 0, None)


@on_recorder
def test_a_pool_that_is_deregistered_takes_no_other_with_it(world):
    pool, other = Pool((A, 10)), Pool((B, 20))
    other.id = (0, 8)
    backend().register_mem_pool(pool)
    backend().register_mem_pool(other)
    library.latest()
    backend().deregister_mem_pool(pool)
    assert library.latest() == [f"deregister:{A}"]
    backend().deregister_mem_pool(other)
    assert library.latest() == [f"deregister:{B}"]


@on_recorder
def test_a_segment_of_another_size_or_use_at_the_address_replaces_the_former(world):
    backend().register_mem_pool(Pool((A, 10)))
    backend().register_mem_pool(Pool((A, 30)))
    assert library.latest() == [f"register:{A}:10", f"deregister:{A}", f"register:{A}:30"]
    backend().register_mem_pool(Pool((A, 30)), symm=True)
    backend().register_mem_pool(Pool((A, 30)), symm=True)
    assert library.latest() == [f"deregister:{A}", f"window:{A}:30:1"]
    backend().deregister_mem_pool(Pool())
    assert library.latest() == [f"no_window:{A}"]


@on_recorder
def test_memory_that_is_freed_is_deregistered_from_all_groups_first(world):
    functions, at = allocation()
    other = dist.new_group([0])._get_backend(torch.device(DEVICE))
    for group in (backend(), other):
        group.register_mem_pool(Pool((at, 64), (A, 10)))
    library.latest()
    free(functions, at)
    assert library.latest() == [f"deregister:{at}", f"deregister:{at}", f"free:{at}"]
    for group in (backend(), other):
        group.deregister_mem_pool(Pool())
    assert library.latest() == [f"deregister:{A}"] * 2


@on_recorder
def test_what_an_aborted_group_had_registered_is_left_to_the_library(world):
    functions, at = allocation()
    backend().register_mem_pool(Pool((at, 64)))
    calls = []
    library.latest()
    backend().abort()
    assert wait_for(lambda: calls.extend(library.latest()) or "abort" in calls, 20), calls
    free(functions, at)
    calls += library.latest()
    assert [call for call in calls if str(at) in call] == [f"free:{at}"], calls
