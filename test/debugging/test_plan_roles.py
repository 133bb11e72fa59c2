"""From which ranks a plan answers for all, by programs written by hand."""

import pytest

from torchcomms_pg.plan.expand import Expansion
from torchcomms_pg.plan.families import Families
from torchcomms_pg.plan.missing import find_missing
from torchcomms_pg.plan.program import Called, Made, Program
from torchcomms_pg.plan.ranges import as_ranges, from_ranges
from torchcomms_pg.plan.roles import find_roles
from torchcomms_pg.plan.volume import volumes
from torchcomms_pg.trace.dumps import Frame

STEP = (Frame("step", "/home/user/train.py", 10),)
OTHER = (Frame("step", "/home/user/train.py", 20),)


def mesh(*sizes):
    """Returns the calls that make the groups of a mesh of these sizes."""
    count = 1
    for size in sizes:
        count *= size
    made = [Made((tuple(range(count)),), ("0",), "default_pg", "nccl", True, 0)]
    stride = count
    for number, size in enumerate(sizes):
        stride //= size
        firsts = [rank for rank in range(count) if rank // stride % size == 0]
        for first in firsts:
            ranks = tuple(range(first, first + size * stride, stride))
            made.append(Made((ranks,), (str(len(made)),), f"mesh_{number}", "nccl", True, 0))
    return made


def group_of(made, rank, dimension):
    return next(
        number
        for number, each in enumerate(made)
        if each.description == f"mesh_{dimension}" and rank in each.lists[0]
    )


def call(op, made, peer=None, numel=8, root=None, where=0, batch=0):
    sizes = ((numel,),)
    reduction = "SUM" if op == "all_reduce" else ""
    message = (peer, root, reduction, None, batch)
    return Called(op, made, sizes, sizes, "Float", *message, 0, "cpu", where)


class Ranks:
    """Stands for `Runners`: ``calls`` returns what a rank calls."""

    def __init__(self, made, calls):
        self.made, self.calls, self.programs = made, calls, {}

    def run(self, ranks):
        for rank in ranks:
            if rank not in self.programs:
                program = Program(rank, self.made, self.calls(rank), [STEP, OTHER])
                self.programs[rank] = program


def planned(made, calls, size):
    ranks = Ranks(made, calls)
    roles = find_roles(ranks, range(size))
    return roles, ranks.programs, Expansion(roles, ranks.programs).dumps()


def test_one_role_is_run_at_the_ends_and_in_the_middle_of_each_dimension():
    made = mesh(8, 8)
    roles, run, dumps = planned(made, lambda r: [call("all_reduce", group_of(made, r, 0))], 64)
    assert len(roles.ranks) == 1
    assert roles.notes == ["ranks do not differ by their place in 0, 1"]
    assert sorted(run) == [0, 1, 7, 8, 36, 55, 56, 62, 63]
    assert sorted(dumps) == list(range(64))
    assert all(rank in dumps[rank].entries[0].group.ranks for rank in dumps)


def test_a_stage_that_differs_has_each_place_of_its_dimension_run():
    made = mesh(8, 4)

    def calls(rank):  # the deeper a stage, the fewer its calls
        return [call("all_reduce", group_of(made, rank, 1))] * (10 - rank // 4)

    roles, run, dumps = planned(made, calls, 32)
    assert roles.notes == [
        "ranks differ by their place in 0: each place was run",
        "ranks do not differ by their place in 1",
    ]
    assert all(len(dumps[rank].entries) == 10 - rank // 4 for rank in range(32))


DEPENDS = {  # on what a further call depends, and by what ranks then differ
    "rank 0": (lambda *at: not any(at), ["default_pg"]),
    "the last of one dimension": (lambda pp, dp, tp: pp == 4, ["0"]),
    "all but the first of one": (lambda pp, dp, tp: tp > 0, ["2"]),
    "the ends of two dimensions": (lambda pp, dp, tp: pp == 4 and dp == 0, ["0", "1"]),
    "an end of each dimension": (lambda *at: at == (4, 0, 4), ["0", "1", "2"]),
    "the inner ranks of one": (lambda pp, dp, tp: 0 < dp < 4, ["1"]),
}


@pytest.mark.parametrize("what", DEPENDS)
def test_roles_are_as_coarse_as_what_calls_depend_on(what):
    depends, families = DEPENDS[what]
    made = mesh(5, 5, 5)

    def calls(rank):
        more = depends(rank // 25, rank // 5 % 5, rank % 5)
        return [call("all_reduce", group_of(made, rank, 2))] * (1 + more)

    roles, run, dumps = planned(made, calls, 125)
    by = [line.rpartition(" in ")[2] for line in roles.notes if "being first or last" in line]
    assert by == families and len(roles.ranks) == 3 ** len(families)
    assert all(len(dumps[r].entries) == len(calls(r)) for r in range(125))


def test_neighbours_by_even_and_odd_places_have_each_place_run():
    made = mesh(2, 8)

    def calls(rank):
        return [call("send", group_of(made, rank, 1), rank % 8 ^ 1)]

    roles, run, dumps = planned(made, calls, 16)
    assert roles.notes[0] == "ranks differ by their place in 1: each place was run"
    assert [dumps[rank].entries[0].receiver for rank in range(16)] == [r ^ 1 for r in range(16)]


def test_ranks_between_that_do_not_follow_from_the_ends_are_a_role():
    made = mesh(8)
    peers = [3, 3, 3, 3, 3, 3, 3, 2]  # the ends at the same distance, the others of one number
    _, run, dumps = planned(made, lambda r: [call("send", group_of(made, r, 0), peers[r])], 8)
    assert [dumps[rank].entries[0].receiver for rank in range(8)] == peers
    assert len(run) < 8


def test_a_rank_that_differs_alone_has_all_ranks_of_its_role_run():
    made = mesh(8)
    group = group_of(made, 0, 0)
    calls = {6: [call("all_reduce", group), call("all_reduce", 0)]}
    roles, run, dumps = planned(made, lambda r: calls.get(r, [call("all_reduce", group)]), 8)
    assert sorted(run) == list(range(8))
    assert [len(dumps[rank].entries) for rank in range(8)] == [1] * 6 + [2, 1]


@pytest.mark.parametrize("ring", [False, True])
def test_a_peer_is_at_the_same_distance_or_of_the_same_number(ring):
    made = mesh(8)
    group = group_of(made, 0, 0)

    def calls(rank):
        peer = (rank + 1) % 8 if ring else 0
        return [] if peer == rank else [call("send", group, peer)]

    _, _, dumps = planned(made, calls, 8)
    received = {rank: [entry.receiver for entry in dumps[rank].entries] for rank in range(8)}
    expected = {rank: [(rank + 1) % 8] if ring else [0] if rank else [] for rank in range(8)}
    assert received == expected


def test_the_groups_of_a_dimension_are_a_family():
    families = Families(Program(0, mesh(2, 4), [], [STEP]))
    assert [family.name for family in families.all] == ["default_pg", "0", "1"]
    assert families.all[2].places[6] == (2, 4)


def test_a_collective_that_a_rank_leaves_out_is_where_the_others_lines_move_on():
    made = mesh(4)
    group = group_of(made, 0, 0)
    both = [call("all_reduce", group), call("all_reduce", group, where=1)]
    _, _, dumps = planned(made, lambda r: both[1:] if r == 3 else both, 4)
    missing = find_missing(dumps)
    (hazard,) = missing.hazards
    assert (hazard.kind, hazard.ranks, list(missing.first.values())) == ("missing", [3], [1])
    assert "train.py:20" in hazard.lines[1] and "train.py:10" in hazard.lines[2]


def test_volumes_are_those_of_a_ring_and_of_a_tree():
    made = mesh(4)
    group = group_of(made, 0, 0)
    _, _, dumps = planned(made, lambda r: [call("all_reduce", group, numel=100)], 4)
    (volume,) = volumes(dumps, 2)
    # Each rank sends 3/2 of 400 bytes; two of the four links are between hosts.
    assert (volume.calls, volume.inside, volume.between) == (1, 1200, 1200)
    assert volume.tree_between == 800


@pytest.mark.parametrize(
    "text, ranks",
    [
        ("rank 3", [3]),
        ("ranks 0-3", range(4)),
        ("ranks 0-3, 7", [0, 1, 2, 3, 7]),
        ("ranks 0-56 by 8", range(0, 64, 8)),
        ("ranks 0, 8", [0, 8]),
    ],
)
def test_ranks_are_written_as_ranges(text, ranks):
    assert as_ranges(ranks) == text


def test_ranks_are_read_from_ranges():
    assert from_ranges("0-2, 7") == [0, 1, 2, 7]
    with pytest.raises(ValueError, match="no list of ranks"):
        from_ranges("0-x")
