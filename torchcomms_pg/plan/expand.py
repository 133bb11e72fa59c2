"""The calls of all ranks, as dumps: a rank that was not run calls what its role's ranks call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from torchcomms_pg.plan.families import Family
from torchcomms_pg.plan.program import Called, Program
from torchcomms_pg.plan.roles import Role, Roles
from torchcomms_pg.plan.sides import side_of
from torchcomms_pg.trace.dumps import Dump, Dumps, Entry
from torchcomms_pg.trace.groups import Group


class Expansion:
    """Makes the dumps of all ranks of the roles."""

    def __init__(self, roles: Roles, programs: dict[int, Program]) -> None:
        self._roles = roles
        self._programs = programs
        self._groups: dict[tuple[str, tuple[int, ...]], Group] = {}

    def dumps(self) -> Dumps:
        """Returns the dumps."""
        return Dumps(
            dump for role, ranks in self._roles.ranks.items() for dump in self._of(role, ranks)
        )

    def _of(self, role: Role, ranks: list[int]) -> Iterable[Dump]:
        """Yields the dumps of the ranks of one role."""
        first, last = self._programs[ranks[0]], self._programs[ranks[-1]]
        families = self._roles.families
        for rank in ranks:
            program = self._programs.get(rank, first)
            own = program is not first or rank == first.rank
            groups = _Groups(self, rank, program, families.of if not own else None)
            sides = None if own else last
            entries = list(self._entries(rank, program, sides, groups))
            yield Dump(rank, Path(), groups.told, entries, detailed=True)

    def group(self, name: str, ranks: tuple[int, ...], description: str) -> Group:
        """Returns the group of this name and these ranks, the same for all ranks."""
        key = (name, ranks)
        if key not in self._groups:
            self._groups[key] = Group(name, description, len(self._groups), ranks, 0, True)
        return self._groups[key]

    def _entries(
        self, rank: int, program: Program, last: Program | None, groups: _Groups
    ) -> Iterable[Entry]:
        counts: dict[object, int] = defaultdict(int)
        for record, called in enumerate(program.calls):
            group, backend = groups[called.made]
            peer, root = called.peer, called.root
            if last is not None:
                other = last.calls[record]
                places = self._roles.families.of[called.made].places
                sides = tuple(places[each] for each in (program.rank, last.rank, rank))
                peer = side_of(peer, other.peer, *sides, follows=True)
                root = side_of(root, other.root, *sides, follows=False)
            yield _entry(rank, record, called, program, group, backend, peer, root, counts)


class _Groups(dict[int, tuple[Group, str]]):
    """The groups of a rank by the index of the call that made them in the program it was run as.

    ``families``: the calls' families if the rank was not run, otherwise None.
    """

    def __init__(
        self, expansion: Expansion, rank: int, program: Program, families: list[Family] | None
    ) -> None:
        super().__init__()
        self._expansion = expansion
        self._rank = rank
        self._program = program
        self._families = families
        self.told: dict[str, tuple[str, tuple[int, ...]]] = {}
        if families is not None:
            for family in dict.fromkeys(families):
                if rank in family.at:
                    ranks, name, _ = family.at[rank]
                    self.told[name] = (family.description, ranks)
            return
        for made in program.made:
            for some, name in zip(made.lists, made.names, strict=True):
                if rank in some:
                    self.told[name] = (made.description, some)

    def __missing__(self, index: int) -> tuple[Group, str]:
        made = self._program.made[index]
        if self._families is not None:
            ranks, name, _ = self._families[index].at[self._rank]
        else:
            ranks, name = next(
                (some, name)
                for some, name in zip(made.lists, made.names, strict=True)
                if self._rank in some
            )
        self[index] = (self._expansion.group(name, ranks, made.description), made.backend)
        return self[index]


def _entry(
    rank: int,
    record: int,
    called: Called,
    program: Program,
    group: Group,
    backend: str,
    peer: int | None,
    root: int | None,
    counts: dict[object, int],
) -> Entry:
    sender = receiver = number = None
    p2p = peer is not None
    if peer is not None:
        other = None if peer == -1 else group.ranks[peer]
        sender, receiver = (rank, other) if called.op == "send" else (other, rank)
        key: object = (group, called.op, sender, receiver)
        counts[key] += 1
        number = seq = counts[key]
    else:
        counts[group] += 1
        seq = counts[group]
    return Entry(
        rank=rank,
        group=group,
        record=record,
        op_id=record,
        seq=seq,
        number=number,
        p2p=p2p,
        op=called.op,
        sender=sender,
        receiver=receiver,
        input_sizes=called.inputs,
        output_sizes=called.outputs,
        dtype=called.dtype,
        state="completed",
        retired=True,
        created=record,
        started=None,
        completed=record + 1,
        duration_ms=None,
        timeout_ms=0,
        frames=program.stacks[called.where],
        thread=str(called.thread),
        batch=called.batch,
        tag=called.tag,
        from_any=peer == -1,
        root=None if root is None else group.ranks[root],
        reduce_op=called.reduce_op,
        device="" if called.device in ("cpu", "meta") else called.device,  # these stand for any
        backend=backend,
    )
