"""Groups: subgroups that overlap, split, shrink, merge, and destroying and starting again."""

import datetime
import itertools
import os

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.ranks import (
    BACKEND,
    Ranks,
    check,
    connect_store,
    init_default_group,
    on_own_ranks,
    time_limit,
)
from harness.values import HUGE, all_data, assert_reduced, assert_same, data

pytestmark = pytest.mark.torch_version

beyond_gloo = pytest.mark.beyond_gloo
CPU = torch.device("cpu")
LIMIT = datetime.timedelta(seconds=30)


def check_group(group, members):
    """The group's rank, size and collectives are those of `members`, in their order."""
    me = dist.get_rank()
    assert dist.get_world_size(group) == len(members)
    assert dist.get_rank(group) == members.index(me)
    for size in (1, 1025, 100_001):
        inputs = {rank: data(rank, size) for rank in members}
        tensor = inputs[me].clone()
        dist.all_reduce(tensor, group=group)
        assert_reduced(tensor, list(inputs.values()))
        output = torch.empty(len(members) * size)
        dist.all_gather_into_tensor(output, inputs[me], group=group)
        assert_same(output, torch.cat(list(inputs.values())))


@pytest.mark.ranks(4)
def test_every_pair_of_ranks_may_form_a_group_of_its_own(world):
    groups = {pair: dist.new_group(pair) for pair in itertools.combinations(range(world), 2)}
    for pair, group in groups.items():
        if dist.get_rank() in pair:
            check_group(group, list(pair))
    works = []
    for pair, group in groups.items():
        if dist.get_rank() in pair:
            tensor = torch.full((50_001,), float(dist.get_rank()))
            works.append((dist.all_reduce(tensor, group=group, async_op=True), tensor, sum(pair)))
    for work, tensor, want in reversed(works):
        work.wait()
        assert tensor[0] == want and tensor[-1] == want
    for pair, group in groups.items():
        if dist.get_rank() in pair:
            dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_overlapping_groups_may_be_used_in_a_different_order_on_each_rank(world):
    """Asynchronous operations of two groups do not wait for each other."""
    groups = [dist.new_group(), dist.new_group()]
    order = groups if dist.get_rank() == 0 else groups[::-1]
    for _ in range(5):
        tensors = {group: torch.ones(30_001) for group in order}
        works = [dist.all_reduce(x, group=g, async_op=True) for g, x in tensors.items()]
        for work in works:
            work.wait()
        assert all(x[-1] == 2 for x in tensors.values())
    for group in groups:
        dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_gloo_and_the_backend_live_side_by_side(world):
    gloo = dist.new_group(backend="gloo")
    for _ in range(3):
        a, b = torch.ones(1000), torch.ones(1000)
        works = [dist.all_reduce(a, async_op=True), dist.all_reduce(b, group=gloo, async_op=True)]
        for work in works:
            work.wait()
        assert_same(a, b)
    dist.destroy_process_group(gloo)


@pytest.mark.ranks(4)
def test_new_group_of_some_ranks_with_local_synchronization(world):
    members = [0, 2] if dist.get_rank() % 2 == 0 else [1, 3]
    group = dist.new_group(members, use_local_synchronization=True)
    check_group(group, members)
    dist.destroy_process_group(group)


@pytest.mark.ranks(3)
def test_roots_and_peers_are_global_ranks_in_a_subgroup(world):
    members = [world - 2, world - 1]
    group = dist.new_group(members)
    me = dist.get_rank()
    if me in members:
        tensor = data(me, 100)
        dist.broadcast(tensor, src=world - 1, group=group)
        assert_same(tensor, data(world - 1, 100))
        tensor = data(me, 100)
        dist.broadcast(tensor, group_src=0, group=group)
        assert_same(tensor, data(world - 2, 100))
        dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_a_group_of_one_does_everything_alone(world):
    group = [dist.new_group([rank]) for rank in range(world)][dist.get_rank()]
    check_group(group, [dist.get_rank()])
    me = dist.get_rank()
    tensor = data(me, 1000)
    dist.reduce(tensor, me, group=group)
    dist.broadcast(tensor, me, group=group)
    assert_same(tensor, data(me, 1000))
    outputs = [torch.empty(1000)]
    dist.gather(tensor, outputs, me, group=group)
    assert_same(outputs[0], tensor)
    dist.scatter(outputs[0].zero_(), [tensor], me, group=group)
    assert_same(outputs[0], tensor)
    dist.reduce_scatter_tensor(outputs[0].zero_(), tensor.clone(), group=group)
    assert_same(outputs[0], tensor)
    dist.all_to_all_single(outputs[0].zero_(), tensor, group=group)
    assert_same(outputs[0], tensor)
    dist.barrier(group)
    dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_a_group_that_was_never_used_can_be_destroyed(world):
    for _ in range(3):
        dist.destroy_process_group(dist.new_group())


@pytest.mark.ranks(2)
def test_many_groups_at_once(world):
    groups = [dist.new_group() for _ in range(20)]
    for number, group in enumerate(groups):
        tensor = torch.full((100,), float(number))
        dist.all_reduce(tensor, group=group)
        assert tensor[0] == 2 * number
    for group in groups:
        dist.destroy_process_group(group)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.ranks(2)
def test_a_barrier_takes_device_ids_where_there_are_no_devices(world):
    """As programs for both pass them, such as Accelerate's."""
    with FakeTensorMode():  # from then on the guard of CUDA tells of a device that there is not
        pass
    dist.barrier(device_ids=[dist.get_rank()])
    dist.barrier(device_ids=[0, 1], async_op=True).wait()


def split(group, colors, name):
    """The C++ split, which every torch has on CPU."""
    return group.split_group(colors, timeout=LIMIT, group_name=name)


@beyond_gloo
@pytest.mark.ranks((2, 4))
def test_split_group_of_the_process_group(world):
    me = dist.get_rank()
    dist.barrier()
    assert dist.group.WORLD._get_backend(CPU).supports_splitting
    members = [rank for rank in range(world) if rank % 2 == me % 2]
    child = split(dist.group.WORLD, members, f"split{me % 2}")
    assert child.size() == len(members) and child.rank() == members.index(me)
    for size in (1, 100_001):
        tensor = data(me, size)
        child.allreduce([tensor]).wait()
        assert_reduced(tensor, [data(rank, size) for rank in members])
    dist.all_reduce(tensor := torch.ones(3))  # the parent still works
    assert tensor[0] == world
    child.shutdown()


@beyond_gloo
@pytest.mark.ranks(3)
def test_split_keeps_the_order_of_the_given_ranks(world):
    dist.barrier()
    order = [2, 0, 1]
    child = split(dist.group.WORLD, order, "reordered")
    if torch.__version__ < "2.14":
        order.sort()  # torch did that before it asked the backend
    assert child.rank() == order.index(dist.get_rank())
    output = torch.empty(world)
    child._allgather_base(output, torch.tensor([float(dist.get_rank())])).wait()
    assert output.tolist() == order
    child.shutdown()


@pytest.mark.skipif(torch.__version__ < "2.15", reason="needs an accelerator before torch 2.15")
@beyond_gloo
@pytest.mark.ranks(3)
def test_dist_split_group_leaves_the_others_out(world):
    dist.barrier()
    child = dist.split_group(split_ranks=[[0, 1]])
    if dist.get_rank() < 2:
        check_group(child, [0, 1])
        dist.destroy_process_group(child)
    else:
        assert child is dist.GroupMember.NON_GROUP_MEMBER
    dist.barrier()


@beyond_gloo
@pytest.mark.ranks(4)
def test_shrink_gives_a_group_of_the_remaining_ranks(world):
    """Only they call it; the excluded rank does nothing."""
    group = dist.new_group()
    dist.barrier(group)
    backend = group._get_backend(CPU)
    assert backend.supports_shrinking
    me, out = dist.get_rank(), 1
    remaining = [rank for rank in range(world) if rank != out]
    if me != out:
        child = backend.shrink([out])
        assert (child.size(), child.rank()) == (world - 1, remaining.index(me))
        tensor = data(me, 5001)
        child.allreduce([tensor]).wait()
        assert_reduced(tensor, [data(rank, 5001) for rank in remaining])
        child.shutdown()
    dist.barrier()
    dist.destroy_process_group(group)


@beyond_gloo
@on_own_ranks(3)
def test_dist_shrink_group_replaces_the_group():
    # Ranks of their own: torch counts groups on the ranks that call it, so the
    # excluded rank would name its next group otherwise than the others.
    group = dist.new_group()
    dist.barrier(group)
    if dist.get_rank() != 2:
        smaller = dist.shrink_group([2], group)
        check_group(smaller, [0, 1])
    dist.barrier()


def survivors(args):
    """Rank 2 dies inside a group; ranks 0 and 1 are told, shrink it with SHRINK_ABORT and go on."""
    rank, world = int(os.environ["RANK"]), 3
    store = connect_store(*args)
    init_default_group(*args, rank, world, 30)
    dist.barrier()
    backend = dist.group.WORLD._get_backend(CPU)
    if rank == 2:
        os._exit(3)
    with time_limit(0, 20, "noticing"), pytest.raises(RuntimeError, match=r"rank 2\b.*died"):
        dist.all_reduce(torch.ones(5))
    child = backend.shrink([2], dist.distributed_c10d.SHRINK_ABORT)
    tensor = torch.full((1000,), rank + 1.0)
    child.allreduce([tensor]).wait()
    assert tensor[0] == 3
    store.add("done", 1)


@beyond_gloo
def test_shrink_after_a_rank_has_died():
    with Ranks(3, init=False) as ranks:
        ranks.start(survivors, ranks.store_args())
        outcomes = ranks.wait()
        check(outcomes[:2])
        assert "exit code 3" in outcomes[2].died


@beyond_gloo
@pytest.mark.ranks(3)
def test_shrink_has_a_deadline_and_can_be_tried_again(store):
    """Rank 1 gives up, and tries again when rank 0 is about to come."""
    rank = dist.get_rank()
    group = dist.new_group()
    dist.barrier(group)
    backend = group._get_backend(CPU)
    if rank == 1:
        backend.set_timeout(datetime.timedelta(seconds=1))
        with time_limit(0.9, 20, "giving up"):
            with pytest.raises(RuntimeError, match="timed out after 1 s: not all ranks that stay"):
                backend.shrink([2])
        backend.set_timeout(LIMIT)
        store.set("given up", "")
    if rank < 2:
        store.wait(["given up"])
        child = backend.shrink([2])
        tensor = data(rank, 5001)
        child.allreduce([tensor]).wait()
        assert_reduced(tensor, [data(r, 5001) for r in range(2)])
        child.shutdown()
    dist.barrier()
    dist.destroy_process_group(group)


@beyond_gloo
@pytest.mark.ranks(3)
def test_merge_remote_group_joins_two_groups(store):
    """Groups {0, 1} and {2} become one of three."""
    me = dist.get_rank()
    pair, single = dist.new_group([0, 1]), dist.new_group([2])
    mine = pair if me < 2 else single
    dist.barrier(mine)
    whole = mine.merge_remote_group(store, 3, timeout=LIMIT, group_name="merged")
    assert whole.size() == 3
    ranks = torch.empty(3)
    whole._allgather_base(ranks, torch.tensor([float(me)])).wait()
    assert sorted(ranks.tolist()) == [0, 1, 2] and ranks[whole.rank()] == me
    tensor = data(me, 70_001)
    whole.allreduce([tensor]).wait()
    assert_reduced(tensor, all_data(3, 70_001))
    whole.shutdown()


@on_own_ranks(1, 3, init=False)
def test_destroy_and_init_again_in_one_process(port, prefix, world):
    rank = int(os.environ["RANK"])
    for turn in range(5):
        init_default_group(port, f"{prefix}/{turn}", rank, world, 30)
        assert dist.get_backend() == BACKEND
        tensor = data(rank, 100_001, salt=turn)
        dist.all_reduce(tensor)
        assert_reduced(tensor, all_data(world, 100_001, salt=turn))
        group = dist.new_group()
        dist.barrier(group)
        dist.destroy_process_group()
        assert not dist.is_initialized()


@beyond_gloo
@on_own_ranks(2, init=False)
def test_abort_and_init_again_in_one_process(port, prefix, world):
    rank = int(os.environ["RANK"])
    for turn in range(3):
        init_default_group(port, f"{prefix}/{turn}", rank, world, 30)
        dist.all_reduce(tensor := torch.ones(10))
        assert tensor[0] == world
        dist.distributed_c10d._abort_process_group()


@on_own_ranks(3, init=False)
def test_init_method_file(world, tmp_path):
    dist.init_process_group(
        BACKEND,
        init_method=f"file://{tmp_path}/store",
        rank=int(os.environ["RANK"]),
        world_size=world,
    )
    dist.all_reduce(tensor := torch.ones(HUGE))
    assert tensor[-1] == world
    dist.destroy_process_group()


def env_init(world):
    dist.init_process_group(BACKEND)  # MASTER_ADDR and the rest, as torchrun sets them
    dist.all_reduce(tensor := torch.ones(10))
    assert tensor[0] == world
    dist.destroy_process_group()


def test_init_from_the_environment(tmp_path):
    port, _ = Ranks.store_args()
    env = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2")
    env["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is there already
    with Ranks(2, init=False, env=env) as ranks:
        ranks.run(env_init, 2)
