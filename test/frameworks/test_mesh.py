"""Device meshes, and the groups that torch makes from others, are the same as over Gloo."""

import datetime
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from harness.parity import like_gloo, raised, refused
from harness.values import data

pytestmark = pytest.mark.torch_version

CPU = torch.device("cpu")
FROM_2_15 = torch.__version__ >= "2.15"


def seen(group):
    """Who is in a group, and what its collectives give."""
    members = dist.get_process_group_ranks(group)
    tensor = data(dist.get_rank(), 50, torch.int64)
    dist.all_reduce(tensor, group=group)
    gathered = [None] * len(members)
    dist.all_gather_object(gathered, dist.get_rank(), group=group)
    return members, dist.get_rank(group), tensor, gathered


def mesh_state(mesh):
    coordinate = [int(i) for i in mesh.get_coordinate() or []]
    return [coordinate, mesh.mesh.tolist(), [seen(group) for group in mesh.get_all_groups()]]


@like_gloo(4)
def test_meshes_of_one_to_three_dimensions_their_slices_and_flattened_ones():
    line = init_device_mesh("cpu", (4,))
    plane = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    cube = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    flat = cube["pp", "dp"]._flatten("pp_dp")
    by_group = DeviceMesh.from_group(plane.get_group("dp"), "cpu")
    ranks_of_a_slice = plane["tp"].get_local_rank(), plane.get_local_rank("dp")
    meshes = [line, plane, cube, plane["tp"], cube["dp", "tp"], flat, by_group]
    errors = [
        raised(init_device_mesh, "cpu", (3, 2)),
        raised(lambda: plane["nothing"]),
        raised(lambda: cube["tp", "pp"].get_group()),
        raised(lambda: DeviceMesh.from_group([plane.get_group("dp")] * 2, "cpu")),
    ]
    return [mesh_state(mesh) for mesh in meshes], ranks_of_a_slice, errors


@like_gloo(4)
def test_a_mesh_of_some_ranks_and_of_permuted_ranks():
    some = DeviceMesh("cpu", [1, 3])
    permuted = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("a", "b"))
    state = mesh_state(permuted)
    return state, mesh_state(some) if dist.get_rank() in (1, 3) else some.get_coordinate()


@like_gloo(4)
def test_new_group_overlapping_subgroups_and_enumeration():
    groups = [dist.new_group(ranks) for ranks in ([0, 1, 2], [1, 2, 3], [0, 3], [2])]
    results = [seen(g) for g in groups if g is not dist.GroupMember.NON_GROUP_MEMBER]
    mine, all_of_them = dist.new_subgroups(2)
    results.append([seen(mine), len(all_of_them)])
    mine, all_of_them = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    results.append([seen(mine), len(all_of_them)])
    unsorted = dist.new_group([3, 0], group_desc="pair")
    results.append(seen(unsorted) if dist.get_rank() in (0, 3) else None)
    errors = [
        raised(dist.new_group, [0, 7]),
        # Before 2.13 torch takes it for a group of two, which waits for the second.
        raised(dist.new_group, [0, 0]) if torch.__version__ >= "2.13" else None,
        raised(dist.new_subgroups, 3),
        raised(dist.new_subgroups, 8),
        raised(dist.new_subgroups_by_enumeration, [[0, 1], [1, 2]]),
    ]
    return results, errors


def split_body():
    dist.barrier()
    half = dist.split_group(split_ranks=[[0, 2], [1]], group_desc="half")
    results = [seen(half) if half is not dist.GroupMember.NON_GROUP_MEMBER else None]
    if half is not dist.GroupMember.NON_GROUP_MEMBER:
        alone = dist.split_group(half, [[0]] if half.size() == 1 else [[0], [1]])
        results.append(seen(alone))
    late = dist.split_group(split_ranks=[[2, 0, 1]], timeout=datetime.timedelta(seconds=20))
    results.append(seen(late))
    return results


@pytest.mark.skipif(not FROM_2_15, reason="before torch 2.15 split_group needs an accelerator")
@like_gloo(3)
def test_split_group():
    return split_body()


@pytest.mark.skipif(not FROM_2_15, reason="before torch 2.15 a device_id is an accelerator's")
@like_gloo(3, ours=dict(device_id=torch.device("cpu", 0)))
def test_split_group_and_mesh_with_a_device_id():
    """Torch's Gloo takes a device_id, and then cannot make groups of some ranks; this one can."""
    results = [split_body()]
    mesh = init_device_mesh("cpu", (3, 1), mesh_dim_names=("a", "b"))
    results.append(mesh_state(mesh))
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=dist.new_group())
    return results, tensor


@pytest.mark.skipif(FROM_2_15, reason="from torch 2.15 on CPU groups split")
@like_gloo(2)
def test_before_2_15_split_group_without_an_accelerator_is_torchs_own_error():
    return raised(dist.split_group, split_ranks=[[0], [1]])


@like_gloo(2, 3)
def test_object_collectives():
    me, world = dist.get_rank(), dist.get_world_size()
    mine = {"rank": me, "text": "x" * (500 * me), "tensor": data(me, 5)}
    gathered = [None] * world
    dist.all_gather_object(gathered, mine)
    things = [("a", 1), None, {2}] if me == world - 1 else [None] * 3
    dist.broadcast_object_list(things, src=world - 1)
    collected = [None] * world if me == 0 else None
    dist.gather_object(mine, collected, dst=0)
    part = [None]
    dist.scatter_object_list(part, [str(r) for r in range(world)] if me == 0 else None, src=0)
    if me == 0:
        dist.send_object_list([{"to": 1}, 7], dst=1)
    received = [None, None]
    source = dist.recv_object_list(received, src=0) if me == 1 else None
    errors = [
        raised(dist.all_gather_object, gathered, threading.Lock()),  # cannot be pickled
        raised(dist.scatter_object_list, [], ["a"] * world, src=0),
    ]
    things = [str(thing) for thing in things]
    return gathered, things, collected, part, received, source, errors


@like_gloo(2, 3)
def test_batched_messages_and_collectives_of_the_group():
    me, world = dist.get_rank(), dist.get_world_size()
    outgoing, incoming = data(me, 100), torch.empty(100)
    after, before = (me + 1) % world, (me - 1) % world
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, outgoing, after),
            dist.P2POp(dist.irecv, incoming, before),
        ]
    )
    for work in works:
        work.wait()
    dist.barrier()
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=20), wait_all_ranks=True)
    errors = [
        refused(dist.batch_isend_irecv, []),
        refused(dist.send, outgoing, dst=me),
        refused(dist.broadcast, outgoing, src=world),
        refused(dist.all_gather, [torch.empty(3)], outgoing),
        refused(dist.all_reduce, "no tensor"),
    ]
    return incoming, errors


@like_gloo(2)
def test_set_timeout_sequence_numbers_and_what_a_group_tells_of_itself():
    group = dist.new_group(timeout=datetime.timedelta(seconds=21), group_desc="mine")
    group.set_timeout(datetime.timedelta(seconds=22))
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=23), group)
    dist.distributed_c10d._add_ephemeral_timeout_for_all_pgs(datetime.timedelta(seconds=1))
    backend = group._get_backend(CPU)
    timeout = backend.options._timeout.total_seconds()
    before = backend._get_sequence_number_for_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(2), group=group)
    after = backend._get_sequence_number_for_group()
    of_the_group = group._get_sequence_number_for_group()
    name = dist.get_backend(group)
    facts = [timeout, after - before, of_the_group - before, group.group_desc]
    facts += [
        group.size(),
        group.rank(),
        dist.get_backend_config(group) == f"cpu:{name},cuda:{name}",
    ]
    facts += [dist.is_backend_available(name), raised(group.set_timeout, "soon")]

    def estimate():
        with dist.distributed_c10d._time_estimator(group, CPU):
            dist.all_reduce(torch.ones(2), group=group)

    facts.append(raised(estimate))
    assert "NotImplementedError" in facts[-1]
    dist.destroy_process_group(group)
    return facts
