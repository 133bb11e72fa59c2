"""Collectives and messages of tensors that are not contiguous."""

import functools

import pytest
import torch
import torch.distributed as dist

from harness.ranks import on_ranks
from harness.values import MOVABLE, all_data, assert_reduced, assert_same, data, layouts

moves = pytest.mark.parametrize("dtype", MOVABLE, ids=lambda d: str(d).removeprefix("torch."))
beyond_gloo = pytest.mark.beyond_gloo


def done(name, operation, *args):
    """Run it. Tensors with gaps may be refused (ProcessGroupNCCL does), if the error says so."""
    try:
        operation(*args)
    except (ValueError, RuntimeError) as error:
        assert name in ("strided", "inner") and not isinstance(error, dist.DistBackendError)
        assert "dense" in str(error) or "contiguous" in str(error)
        return False
    return True


@beyond_gloo
@on_ranks()
def test_gather_and_scatter_of_every_layout(world):
    for name, tensor in layouts(dist.get_rank()).items():
        outputs = [torch.empty(6, 5, 4) for _ in range(world)] if dist.get_rank() == 0 else None
        if done(name, dist.gather, tensor, outputs):
            for rank in range(world if outputs else 0):
                assert_same(outputs[rank], data(rank, (6, 5, 4)), name)
    for name, tensor in layouts(0).items():
        parts = all_data(world, (6, 5, 4)) if dist.get_rank() == 0 else None
        if done(name, dist.scatter, tensor, parts):
            assert_same(tensor, data(dist.get_rank(), (6, 5, 4)), name)


@beyond_gloo  # which overwrites what lies between the elements of a tensor with gaps
@on_ranks()
@pytest.mark.parametrize("dtype", (torch.float32, torch.int64))
def test_all_reduce_handles_every_layout(world, dtype):
    inputs = all_data(world, (6, 5, 4), dtype)
    for name, tensor in layouts(dist.get_rank(), dtype).items():
        if done(name, dist.all_reduce, tensor):
            assert_reduced(tensor.contiguous(), inputs, what=name)


@beyond_gloo
@on_ranks(2, 3)
def test_ranks_may_use_different_layouts_of_one_shape(world):
    """Values count, not memory order: rank 0 is contiguous, the others are transposed."""
    inputs = all_data(world, (6, 5, 4))
    layout = "transposed" if dist.get_rank() else "contiguous"
    mine = layouts(dist.get_rank())[layout]
    dist.all_reduce(mine)
    assert_reduced(mine.contiguous(), inputs)
    mine = layouts(dist.get_rank())[layout]
    dist.broadcast(mine, 0)
    assert_same(mine, inputs[0])


@beyond_gloo
@on_ranks()
def test_broadcast_and_reduce_handle_every_layout(world):
    inputs = all_data(world, (6, 5, 4))
    for name, tensor in layouts(dist.get_rank()).items():
        if done(name, dist.broadcast, tensor, world - 1):
            assert_same(tensor, inputs[world - 1], name)
    for name, tensor in layouts(dist.get_rank()).items():
        if done(name, dist.reduce, tensor, 0) and dist.get_rank() == 0:
            assert_reduced(tensor.contiguous(), inputs, what=name)


@beyond_gloo
@on_ranks()
def test_list_collectives_handle_every_layout(world):
    me = dist.get_rank()
    inputs = all_data(world, (6, 5, 4))
    for name, tensor in layouts(me).items():
        outputs = [layouts(0)[name].zero_() for _ in range(world)]
        if done(name, dist.all_gather, outputs, tensor):
            for rank in range(world):
                assert_same(outputs[rank], inputs[rank], name)
        output = layouts(0)[name].zero_()
        parts = [layouts(me)[name] for _ in range(world)]
        if done(name, dist.reduce_scatter, output, parts):
            assert_reduced(output.contiguous(), inputs, what=name)


@beyond_gloo
@on_ranks()
def test_flat_collectives_handle_tensors_with_gaps_or_refuse_them(world):
    """A column of a matrix as input or as output."""
    me = dist.get_rank()
    inputs = all_data(world, (world * 3, 2))
    columns = [x[:, 0] for x in inputs]
    output = torch.zeros(world * world * 3, 2)
    if done("strided", dist.all_gather_into_tensor, output[:, 0], columns[me]):
        assert_same(output[:, 0].contiguous(), torch.cat(columns))
    output = torch.zeros(3, 2)
    if done("strided", dist.reduce_scatter_tensor, output[:, 0], columns[me].clone()):
        assert_reduced(output[:, 0].contiguous(), [x.chunk(world)[me] for x in columns])
    output = torch.zeros(world * 3, 2)
    if done("strided", dist.all_to_all_single, output[:, 0], columns[me]):
        want = torch.cat([x.chunk(world)[me] for x in columns])
        assert_same(output[:, 0].contiguous(), want)
    assert not output[:, 1].any()


@beyond_gloo
@on_ranks(2)
def test_send_and_recv_of_every_layout(world):
    operation, peer = (dist.send, 1) if dist.get_rank() == 0 else (dist.recv, 0)
    for name, tensor in layouts(dist.get_rank()).items():
        if done(name, operation, tensor, peer):
            assert_same(tensor, data(0, (6, 5, 4)), name)


@beyond_gloo
@on_ranks(2, 3)
@pytest.mark.parametrize("async_op", (False, True))
def test_results_reach_tensors_of_inference_mode_inside_it_and_after(world, async_op):
    me = dist.get_rank()
    inputs = all_data(world, (6, 5, 4))
    whole = all_data(world, 1025, torch.int32)
    with torch.inference_mode():
        strided = [inputs[me].clone().transpose(0, 2) for _ in range(2)]
        bits = [whole[me].clone() for _ in range(2)]
        parts = [[torch.empty(6, 5, 4) for _ in range(world)] for _ in range(2)]
    for turn in range(2):
        works = []
        with torch.inference_mode(turn == 0):
            works.append(dist.all_reduce(strided[turn], async_op=async_op))
            works.append(dist.all_reduce(bits[turn], dist.ReduceOp.BXOR, async_op=async_op))
            works.append(dist.all_gather(parts[turn], inputs[me], async_op=async_op))
        for work in works if async_op else ():
            work.wait()
        assert_reduced(strided[turn].transpose(0, 2).contiguous(), inputs)
        assert_same(bits[turn], functools.reduce(torch.bitwise_xor, whole))
        for part, expected in zip(parts[turn], inputs):
            assert_same(part, expected)
