"""Memory on GPUs: how long tensors live, pools that are registered, what NCCL gives back."""

import gc

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from harness import gpus
from harness.gpus import on_gpus, on_ours
from torchcomms_pg import nccl

if reason := gpus.missing():
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.torch_version

MIB = 2**20


def peak(body):
    """How many bytes more than before `body` has at most, called a second time."""
    for _ in range(2):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        body()
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("how", ("work", "functional"))
@on_gpus(2)
def test_the_result_of_an_operation_lives_as_long_as_its_users(world, how):
    part = torch.ones(MIB // 4, device="cuda")

    def gather():
        for _ in range(12):
            if how == "functional":
                functional.wait_tensor(functional.all_gather_tensor(part, 0, dist.group.WORLD))
                continue
            output = torch.empty(world * part.numel(), device="cuda")
            work = dist.all_gather_into_tensor(output, part, async_op=True)
            work.wait()
            del work, output

    assert peak(gather) <= 2 * world * MIB


@pytest.mark.parametrize("async_op", (False, True), ids=("sync", "async"))
@on_gpus(2)
def test_a_list_of_tensors_takes_no_memory_beside_them(world, async_op):
    part = torch.ones(MIB // 4, device="cuda")
    parts = [torch.empty_like(part) for _ in range(world)]
    of_root = parts if dist.get_rank() == 0 else None
    calls = {
        "all_gather": lambda **how: dist.all_gather(parts, part, **how),
        "reduce_scatter": lambda **how: dist.reduce_scatter(part, parts, **how),
        "gather": lambda **how: dist.gather(part, of_root, 0, **how),
        "scatter": lambda **how: dist.scatter(part, of_root, 0, **how),
        "all_to_all": lambda **how: dist.all_to_all(parts, [*parts[1:], part], **how),
    }
    if dist.get_backend() == gpus.LEGACY:
        del calls["all_gather"], calls["reduce_scatter"]  # through one tensor of all

    def once(call):
        work = call(async_op=async_op)
        if async_op:
            work.wait()

    for name, call in calls.items():
        assert peak(lambda call=call: once(call)) < MIB, name


def backend():
    """Of the default group, connected."""
    dist.all_reduce(torch.ones(1, device="cuda"))
    return dist.group.WORLD._get_backend(gpus.current_device())


def need(function, since):
    if function in nccl.load().missing:
        found = ".".join(map(str, nccl.version()))
        pytest.skip(f"NCCL {found} has no {function}, which came with {since}")


def assert_sums(tensor, world):
    dist.all_reduce(tensor.fill_(1))
    dist.all_reduce(tensor, async_op=True).wait()
    assert (tensor.cpu() == world**2).all(), tensor[:4].cpu()


@on_gpus(2)
def test_tensors_of_a_registered_pool_are_reduced(world):
    group = backend()
    try:
        pool = torch.cuda.MemPool(group.mem_allocator)
    except RuntimeError as error:
        assert "allocator is not supported" in str(error)
        pytest.skip("this torch's nccl has no allocator")
    with torch.cuda.use_mem_pool(pool):
        tensor = torch.empty(1000, device="cuda")
    group.register_mem_pool(pool)
    assert_sums(tensor, world)
    group.deregister_mem_pool(pool)
    del tensor, pool
    torch.cuda.empty_cache()


def in_pool(pool):
    with torch.cuda.use_mem_pool(pool):
        return torch.ones(4 * MIB, device="cuda")


@on_ours(1)
def test_a_pool_is_registered_in_both_ways_and_freed_while_registered(world):
    need("ncclMemAlloc", "2.19.3")
    group = backend()
    pool = torch.cuda.MemPool(group.mem_allocator)
    tensor = in_pool(pool)
    group.register_mem_pool(pool)
    assert_sums(tensor, world)
    later = in_pool(pool)
    group.register_mem_pool(pool)
    assert_sums(later, world)
    group.deregister_mem_pool(pool)
    assert_sums(tensor, world)
    if "ncclCommWindowRegister" not in nccl.load().missing:
        group.register_mem_pool(pool, symm=True)
        assert_sums(tensor, world)
        group.deregister_mem_pool(pool)
    group.register_mem_pool(pool)
    torch.cuda.synchronize()
    del tensor, later, pool  # frees its memory, which was not deregistered
    assert_sums(torch.ones(MIB, device="cuda"), world)


@on_ours(1)
def test_tensors_that_the_group_allocates_are_reduced(world):
    need("ncclMemAlloc", "2.19.3")
    for _ in range(3):
        tensor = backend().allocate_tensor(MIB, dtype=torch.float32, device=gpus.current_device())
        assert tensor.shape == (MIB,) and tensor.device == gpus.current_device()
        assert_sums(tensor, world)


@gpus.on_own_ranks(1, 2)
def test_memory_is_given_back_and_taken_again(port, prefix, world):
    gpus.torchcomms(port, prefix, world, 30)
    need("ncclCommSuspend", "2.29.7")
    group, tensor = backend(), torch.ones(MIB, device="cuda")
    assert_sums(tensor, world)
    before = group.memory_stats()
    assert before["suspended"] == 0 and before["total"] > 0, before
    for _ in range(2):
        group.suspend()
        assert group.memory_stats()["suspended"] == 1
        with pytest.raises(RuntimeError, match="is suspended"):
            dist.all_reduce(tensor)
        group.resume()
        assert_sums(tensor, world)
