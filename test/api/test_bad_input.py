"""A caller's mistake: the right exception at once, what and where, and nothing is enqueued.

In every test only rank 0 makes the mistake. Had anything been enqueued, the all_reduce that both
ranks call next would pair with it and fail or give a wrong sum.
"""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.ranks import time_limit
from harness.values import assert_same

pytestmark = pytest.mark.beyond_gloo
CPU = torch.device("cpu")
MISTAKE = (ValueError, TypeError, RuntimeError)


def ones(*shape, **kwargs):
    return torch.ones(*shape, **kwargs)


def backend():
    return dist.group.WORLD._get_backend(CPU)


def options(name, **fields):
    result = getattr(dist, name + "Options")()
    for field, value in fields.items():
        setattr(result, field, value)
    return result


def fake_cuda():
    with FakeTensorMode():
        return torch.empty(4, device="cuda")


def sparse():
    return torch.eye(4).to_sparse()


def freed(size=0, tensor=None):
    tensor = ones(4) if tensor is None else tensor
    tensor.untyped_storage().resize_(size)
    return tensor


# name: (call, pattern of the operation, patterns that the message must also have)
CASES = {
    # wrong device
    "all_reduce meta": (
        lambda: backend().allreduce([ones(4, device="meta")]),
        "all_?reduce",
        ["meta|device"],
    ),
    "all_gather meta output": (
        lambda: backend()._allgather_base(ones(8, device="meta"), ones(4)),
        "all_?gather",
        ["meta|device"],
    ),
    "all_gather meta in list": (
        lambda: backend().allgather([[ones(4), ones(4, device="meta")]], [ones(4)]),
        "all_?gather",
        ["meta|device"],
    ),
    "send meta": (lambda: backend().send([ones(4, device="meta")], 1, 0), "send", ["meta|device"]),
    # memory that is not there
    "all_reduce freed": (
        lambda: dist.all_reduce(freed()),
        "all_reduce",
        ["16 bytes of its storage", "resized to 0"],
    ),
    "all_reduce cut": (
        lambda: dist.all_reduce(freed(15)),
        "all_reduce",
        ["16 bytes of its storage", "resized to 15"],
    ),
    "broadcast cut view": (
        lambda: dist.broadcast(freed(56, ones(8, 2)[4:, 0]), 0),
        "broadcast",
        ["60 bytes of its storage", "resized to 56"],
    ),
    "send freed": (lambda: dist.send(freed(), 1), "send", ["resized to 0"]),
    "all_gather freed in list": (
        lambda: dist.all_gather([ones(4), freed()], ones(4)),
        "all_gather",
        [r"tensor_list\[1\]", "resized to 0"],
    ),
    # wrong dtype
    "all_gather dtype": (
        lambda: dist.all_gather([ones(4), ones(4, dtype=torch.float64)], ones(4)),
        "",
        ["(?i)dtype|type"],
    ),
    "all_gather_into_tensor dtype": (
        lambda: dist.all_gather_into_tensor(ones(8, dtype=torch.float64), ones(4)),
        "all_?gather",
        ["(?i)dtype|type", "(?i)output|float64|double"],
    ),
    "reduce_scatter_tensor dtype": (
        lambda: dist.reduce_scatter_tensor(ones(4, dtype=torch.int32), ones(8)),
        "reduce_?scatter",
        ["(?i)dtype|type"],
    ),
    "all_to_all_single dtype": (
        lambda: backend().alltoall_base(ones(4, dtype=torch.int32), ones(4), [], []),
        "all_?to_?all",
        ["(?i)dtype|type"],
    ),
    "scatter dtype": (
        lambda: dist.scatter(ones(4), [ones(4), ones(4, dtype=torch.int32)], 0),
        "",
        ["(?i)dtype|type"],
    ),
    "gather dtype": (
        lambda: dist.gather(ones(4), [ones(4), ones(4, dtype=torch.int32)], 0),
        "",
        ["(?i)dtype|type"],
    ),
    "quantized dtype": (
        lambda: dist.all_reduce(torch.quantize_per_tensor(ones(4), 0.1, 0, torch.qint8)),
        "all_?reduce",
        ["(?i)dtype|type|qint8|quint8"],
    ),
    # wrong shape
    "all_gather shape": (
        lambda: dist.all_gather([ones(5), ones(4)], ones(4)),
        "all_?gather",
        ["(?i)output|tensor", "(?i)size|shape|element"],
    ),
    "all_gather_into_tensor size": (
        lambda: dist.all_gather_into_tensor(ones(9), ones(4)),
        "all_?gather",
        ["(?i)output", "9|8"],
    ),
    "reduce_scatter_tensor size": (
        lambda: dist.reduce_scatter_tensor(ones(4), ones(9)),
        "reduce_?scatter",
        ["(?i)input", "9|8"],
    ),
    "reduce_scatter own part": (
        lambda: dist.reduce_scatter(ones(4), [ones(5), ones(4)]),
        "reduce_?scatter",
        ["(?i)size|shape|element"],
    ),
    "gather shape": (
        lambda: dist.gather(ones(4), [ones(4), ones(3)], 0),
        "gather",
        ["(?i)output|gather_list", "(?i)size|shape|element"],
    ),
    "scatter shape": (
        lambda: dist.scatter(ones(4), [ones(4), ones(3)], 0),
        "scatter",
        ["(?i)input|scatter_list", "(?i)size|shape|element"],
    ),
    # wrong layout
    "broadcast sparse": (
        lambda: dist.broadcast(sparse(), 0),
        "broadcast",
        ["(?i)sparse|layout|strided|dense"],
    ),
    "all_gather sparse": (
        lambda: backend().allgather([[ones(4), ones(4)]], [sparse()]),
        "all_?gather",
        ["(?i)sparse|layout|strided|dense"],
    ),
    "expanded tensor as output": (
        lambda: dist.all_reduce(ones(1).expand(4)),
        "all_?reduce",
        ["(?i)dense|contiguous|overlap"],
    ),
    "conjugate by a flag": (
        lambda: backend().allreduce([ones(4, dtype=torch.complex64).conj()]),
        "all_?reduce",
        ["conj", "resolve_conj"],
    ),
    "negative by a flag": (
        lambda: backend().allreduce([ones(4, dtype=torch.complex64).conj().imag]),
        "all_?reduce",
        ["negative", "resolve_neg"],
    ),
    # list length
    "all_gather list too short": (
        lambda: dist.all_gather([ones(4)], ones(4)),
        "all_?gather",
        ["(?i)output|list|tensors", "1|2"],
    ),
    "reduce_scatter list too long": (
        lambda: dist.reduce_scatter(ones(4), [ones(4)] * 3),
        "reduce_?scatter",
        ["(?i)input|list|tensors", "3|2"],
    ),
    "all_to_all list too short": (
        lambda: dist.all_to_all([ones(4)], [ones(4), ones(4)]),
        "all_?to_?all",
        ["(?i)output|list|tensors", "1|2"],
    ),
    "gather list too long": (
        lambda: dist.gather(ones(4), [ones(4)] * 3, 0),
        "gather",
        ["(?i)output|list", "3|2"],
    ),
    "scatter list too short": (
        lambda: dist.scatter(ones(4), [ones(4)], 0),
        "scatter",
        ["(?i)input|list", "1|2"],
    ),
    "two tensors in one all_reduce": (
        lambda: backend().allreduce([ones(4), ones(4)]),
        "all_?reduce",
        ["(?i)one tensor|wanted one|single|1 tensor|exactly"],
    ),
    "no tensor in all_reduce": (lambda: backend().allreduce([]), "all_?reduce", ["(?i)tensor"]),
    # split sizes
    "split sizes do not add up": (
        lambda: dist.all_to_all_single(ones(4), ones(4), [1, 1], [2, 2]),
        "all_?to_?all",
        ["(?i)split"],
    ),
    "negative split": (
        lambda: dist.all_to_all_single(ones(4), ones(4), [5, -1], [2, 2]),
        "all_?to_?all",
        ["(?i)split"],
    ),
    "number of splits": (
        lambda: dist.all_to_all_single(ones(4), ones(4), [4], [2, 2]),
        "all_?to_?all",
        ["(?i)split"],
    ),
    "equal split of an odd size": (
        lambda: dist.all_to_all_single(ones(5), ones(5)),
        "all_?to_?all",
        ["(?i)divi|split|multiple"],
    ),
    # rank, root, tag
    "broadcast root": (
        lambda: backend().broadcast([ones(4)], options("Broadcast", rootRank=2)),
        "broadcast",
        ["(?i)root", "2"],
    ),
    "broadcast negative root": (
        lambda: backend().broadcast([ones(4)], options("Broadcast", rootRank=-1)),
        "broadcast",
        ["(?i)root", "-1"],
    ),
    "reduce root": (
        lambda: backend().reduce([ones(4)], options("Reduce", rootRank=7)),
        "reduce",
        ["(?i)root", "7"],
    ),
    "gather root": (
        lambda: backend().gather([[ones(4), ones(4)]], [ones(4)], options("Gather", rootRank=5)),
        "gather",
        ["(?i)root", "5"],
    ),
    "scatter root": (
        lambda: backend().scatter([ones(4)], [[ones(4), ones(4)]], options("Scatter", rootRank=5)),
        "scatter",
        ["(?i)root", "5"],
    ),
    "send to a rank outside": (
        lambda: backend().send([ones(4)], 2, 0),
        "send",
        ["(?i)rank|peer|dst", "2"],
    ),
    "recv from a negative rank": (
        lambda: backend().recv([ones(4)], -3, 0),
        "recv",
        ["(?i)rank|peer|src", "-3"],
    ),
    "send to itself outside a batch": (
        lambda: dist.send(ones(4), 0),
        "",
        ["(?i)destination|self|itself"],
    ),
    "negative tag": (lambda: backend().send([ones(4)], 1, -1), "send", ["(?i)tag", "-1"]),
    "gather without a list on the root": (
        lambda: backend().gather([], [ones(4)], options("Gather", rootRank=0)),
        "gather",
        ["(?i)list|output"],
    ),
    "gather with a list elsewhere": (
        lambda: backend().gather([[ones(4), ones(4)]], [ones(4)], options("Gather", rootRank=1)),
        "gather",
        ["(?i)root|list|empty|output"],
    ),
    "scatter with a list elsewhere": (
        lambda: backend().scatter([ones(4)], [[ones(4), ones(4)]], options("Scatter", rootRank=1)),
        "scatter",
        ["(?i)root|list|empty|input"],
    ),
}


def still_usable():
    tensor = torch.full((1001,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor)
    assert_same(tensor, torch.full((1001,), 3.0))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_refused_and_nothing_is_enqueued(world, case):
    call, operation, words = CASES[case]
    before = backend()._get_sequence_number_for_group()
    if dist.get_rank() == 0:
        with time_limit(0, 2, case), pytest.raises(MISTAKE) as error:
            work = call()
            if work is not None:
                work.wait()
        assert not isinstance(error.value, dist.DistError), repr(error.value)
        for word in (f"(?i){operation}", *words):
            error.match(word)
        assert backend()._get_sequence_number_for_group() == before
    still_usable()


@pytest.mark.ranks(2)
def test_cuda_tensors_without_a_usable_nccl_say_what_is_missing(world):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    if dist.get_rank() == 0:
        with pytest.raises(MISTAKE, match="(?i)cuda") as error:
            backend().allreduce([fake_cuda()]).wait()
        error.match("(?i)nccl|gpu|driver")
    still_usable()


@pytest.mark.ranks(2)
def test_a_mistake_in_a_batch_of_messages_leaves_nothing_half_sent(world):
    if dist.get_rank() == 0:
        with pytest.raises(MISTAKE):
            good = dist.P2POp(dist.isend, ones(4), 1)
            bad = dist.P2POp(dist.isend, ones(4), 1, tag=-1)
            for work in dist.batch_isend_irecv([good, bad]):
                work.wait()
        dist.distributed_c10d._world.pg_coalesce_state.clear()  # torch itself leaves this behind
    still_usable()
    # The good half of the refused batch must not arrive instead of this.
    tensor = torch.full((4,), 9.0)
    if dist.get_rank() == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor.zero_(), 0)
        assert_same(tensor, torch.full((4,), 9.0))


@pytest.mark.ranks(2)
def test_a_non_writable_or_overlapping_output_is_refused_or_right(world):
    """Two outputs that share memory cannot both be right: all_gather must not corrupt silently."""
    shared = torch.zeros(6)
    outputs = [shared[:4], shared[2:]]
    inputs = [torch.full((4,), 1.0), torch.full((4,), 2.0)]
    try:
        dist.all_gather(outputs, inputs[dist.get_rank()])
    except MISTAKE as error:
        assert "overlap" in str(error)
    else:
        assert_same(shared, torch.tensor([1.0, 1, 2, 2, 2, 2]))
    still_usable()


@pytest.mark.ranks(2)
def test_zero_size_tensors_are_no_mistake(world):
    empty = torch.empty(0)
    dist.all_reduce(empty)
    dist.broadcast(empty, 0)
    dist.reduce(empty, 1)
    dist.all_gather([torch.empty(0), torch.empty(0)], empty)
    dist.all_gather_into_tensor(torch.empty(0), empty)
    dist.reduce_scatter_tensor(torch.empty(0), empty)
    dist.all_to_all_single(torch.empty(0), empty)
    dist.all_to_all_single(torch.empty(0, 3), torch.empty(0, 3), [0, 0], [0, 0])
    dist.all_reduce(torch.empty(3, 0, 2))
    dist.send(empty, 1) if dist.get_rank() == 0 else dist.recv(empty, 0)
    still_usable()
