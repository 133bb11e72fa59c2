"""Scenes of ranks that hang, and what is true of each.

A scene has a program for every rank. At first all programs end. Then some ranks are made to compute
for ever, to skip a call, die, stop or leave, or to call something else or in another order.
`Outcome` runs the programs until no rank moves, so its state shows which rank waits for which. A
collective ends when all members of its group have called it at its number, and alike. A message
ends when both its sides are called, in the order of their pair. The module uses neither the
analysis that finds the culprits nor the formats of recorders.
"""

import random
from dataclasses import dataclass, field

COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "barrier", "all_to_all")
DTYPES = ("Float", "Long")

# What a rank does that makes no more calls. Only "die" leaves no dump; it stands also for a kill
# after the end of the program. A stopped rank has written its dump before.
ENDS = ("compute", "leave", "stop", "die")


@dataclass(eq=False)
class Group:
    """``ranks`` are the members' global ranks, in the order of their ranks in the group."""

    name: str
    ranks: list[int]
    description: str = "undefined"


@dataclass(eq=False)
class Call:
    """One rank's call. ``peer`` is a global rank; ``mode`` is sync, async, or never waited for."""

    rank: int
    op: str
    group: Group
    numel: int = 8
    dtype: str = "Float"
    peer: int = -1
    mode: str = "sync"
    tag: int = 0
    batch: list["Call"] | None = None
    # Set by `Outcome`; the times are -1 until the call is issued and has ended.
    number: int = 0  # from 1: of the collective in its group, or of the message in its direction
    created: int = -1
    completed: int = -1

    @property
    def is_message(self):
        return self.op in ("send", "recv")

    @property
    def issued(self):
        return self.created >= 0

    @property
    def done(self):
        return self.completed >= 0

    @property
    def signature(self):
        """What all ranks of a collective have in common."""
        return (self.op, self.dtype, None if self.op == "all_to_all" else self.numel)

    @property
    def route(self):
        sides = (self.rank, self.peer) if self.op == "send" else (self.peer, self.rank)
        return (self.group, *sides)


@dataclass(eq=False)
class Wait:
    """A step of a program that waits for an asynchronous call."""

    call: Call


@dataclass(eq=False)
class Scene:
    seed: int
    size: int
    groups: list[Group]
    programs: list[list]
    eager: bool = False  # whether a send outside a batch ends when it is called
    ends: dict[int, str] = field(default_factory=dict)  # {rank: one of ENDS}


def make(seed, *, unique_names=False):
    """Returns a random scene. With ``unique_names`` no two of its groups have the same name."""
    chance = random.Random(seed)
    size = chance.choice((2, 2, 3, 3, 3, 4, 4, 5, 6, 8))
    groups = [Group("0", list(range(size)), "default_pg")]
    for index in range(chance.choice((0, 1, 1, 2, 2))):
        name = str(index + 1) if unique_names or chance.random() < 0.4 else "tp"
        # Most groups of one name share no rank.
        taken = {rank for group in groups if group.name == name for rank in group.ranks}
        free = sorted(set(range(size)) - taken)
        among = free if len(free) > 1 and chance.random() < 0.8 else list(range(size))
        ranks = chance.sample(among, chance.randint(2, len(among)))
        if all(other.name != name or set(other.ranks) != set(ranks) for other in groups):
            groups.append(Group(name, sorted(ranks)))
    scene = Scene(seed, size, groups, [[] for _ in range(size)], chance.random() < 0.3)
    for _ in range(chance.randint(2, 7)):
        _add_step(scene, chance)
    for _ in range(chance.choice((0, 0, 1, 1, 1, 1, 1, 2, 2, 3))):
        _spoil(scene, chance)
    return scene


def _add_step(scene, chance):
    """Adds calls that end if the calls before them end."""
    group = chance.choice(scene.groups)
    kind = chance.choice(("collective", "collective", "collective", "message", "batch"))
    numel, dtype = chance.choice((1, 8, 64)), chance.choice(DTYPES)
    mode = chance.choice(("sync",) * 6 + ("async", "never"))
    if kind == "collective":
        op = chance.choice(COLLECTIVES)
        for rank in group.ranks:
            own = numel + rank if op == "all_to_all" else 1 if op == "barrier" else numel
            same = "Float" if op == "barrier" else dtype
            _append(scene, chance, Call(rank, op, group, own, same, mode=mode))
    elif kind == "message":
        sender, receiver = chance.sample(group.ranks, 2)
        _append(scene, chance, Call(sender, "send", group, numel, dtype, receiver, mode))
        _append(scene, chance, Call(receiver, "recv", group, numel, dtype, sender, mode))
    else:
        ring = chance.sample(group.ranks, chance.randint(2, len(group.ranks)))
        for place, rank in enumerate(ring):
            batch = [
                Call(rank, "send", group, numel, dtype, ring[(place + 1) % len(ring)]),
                Call(rank, "recv", group, numel, dtype, ring[place - 1]),
            ]
            chance.shuffle(batch)
            _append(scene, chance, *batch)


def _append(scene, chance, *calls):
    program = scene.programs[calls[0].rank]
    # Adds the step, and for each earlier asynchronous call perhaps a wait.
    program.append(calls[0] if len(calls) == 1 else list(calls))
    for call in calls:
        call.batch = list(calls) if len(calls) > 1 else None
    waited = {step.call for step in program if isinstance(step, Wait)}
    for step in program[:-1]:
        if isinstance(step, Call) and step.mode == "async" and step not in waited:
            if chance.random() < 0.4:
                program.append(Wait(step))


def _spoil(scene, chance):
    """Makes one rank do something else, or adds a ring of receives to a group."""
    rank = chance.randrange(scene.size)
    program = scene.programs[rank]
    places = [at for at, step in enumerate(program) if isinstance(step, Call)]
    fault = chance.choice((*ENDS, "compute", "skip", "mismatch", "order", "ring", "extra"))
    if fault in ENDS:
        at = chance.randint(0, len(program))
        if rank not in scene.ends:
            del program[at:]
            scene.ends[rank] = fault
    elif fault == "ring":
        group = chance.choice(scene.groups)
        at = {each: chance.randint(0, len(scene.programs[each])) for each in group.ranks}
        for place, each in enumerate(group.ranks):
            call = Call(each, "recv", group, 8, "Float", group.ranks[place - 1])
            scene.programs[each].insert(at[each], call)
    elif fault == "extra":
        group = chance.choice([group for group in scene.groups if rank in group.ranks])
        call = Call(rank, chance.choice(COLLECTIVES[:3]), group)
        program.insert(chance.randint(0, len(program)), call)
    elif places:
        at = chance.choice(places)
        call = program[at]
        if fault == "skip":
            program[:] = [
                step
                for step in program
                if step is not call and not (isinstance(step, Wait) and step.call is call)
            ]
        elif fault == "order" and at + 1 < len(program):
            if not (isinstance(program[at + 1], Wait) and program[at + 1].call is call):
                program[at], program[at + 1] = program[at + 1], program[at]
        elif fault == "mismatch" and not call.is_message:
            what = "op" if call.op == "barrier" else chance.choice(("op", "numel", "dtype"))
            if what == "op":
                call.op = chance.choice([op for op in COLLECTIVES[:3] if op != call.op])
            elif what == "numel":
                call.numel += 100
            else:
                call.dtype = "Half"


class Outcome:
    """The state of a scene in which no rank moves any more.

    ``doing[rank]`` is the list of calls that the rank is blocked in, or one of ENDS if the rank
    makes no more calls. All methods judge by the calls themselves, also by calls that no dump has.
    """

    def __init__(self, scene):
        self.scene = scene
        self.calls = {rank: [] for rank in range(scene.size)}  # the issued calls, in order
        self.doing = {}
        self.now = 0
        self.counts = {}
        self.places = {}  # (group, number): {rank: call}
        self.sides = {}  # (route, number): {op: call}
        self._run()

    def _tick(self):
        self.now += 1
        return self.now

    def _run(self):
        scene = self.scene
        at = [0] * scene.size
        moved = True
        while moved:
            moved = False
            for rank, program in enumerate(scene.programs):
                while at[rank] < len(program):
                    step = program[at[rank]]
                    calls = step if isinstance(step, list) else [getattr(step, "call", step)]
                    for call in calls:
                        if not call.issued and not isinstance(step, Wait):
                            self._issue(call)
                            moved = True
                    holds = isinstance(step, Wait) or calls[0].mode == "sync"
                    # A wait before its call, as after a change of the order, does not block.
                    if holds and any(call.issued and not call.done for call in calls):
                        self.doing[rank] = calls
                        break
                    at[rank] += 1
                    moved = True
                else:
                    self.doing[rank] = scene.ends.get(rank, "leave")

    def _count(self, key):
        self.counts[key] = self.counts.get(key, 0) + 1
        return self.counts[key]

    def _issue(self, call):
        call.created = self._tick()
        self.calls[call.rank].append(call)
        if not call.is_message:
            call.number = self._count((call.rank, call.group))
            place = self.places.setdefault((call.group, call.number), {})
            place[call.rank] = call
            if len(place) == len(call.group.ranks):
                if len({each.signature for each in place.values()}) == 1:
                    for each in place.values():
                        each.completed = self._tick()
            return
        call.number = self._count((call.op, call.route))
        sides = self.sides.setdefault((call.route, call.number), {})
        sides[call.op] = call
        if self.scene.eager and call.op == "send" and call.batch is None:
            call.completed = self._tick()
        if len(sides) == 2 and self.fits(call):
            for each in sides.values():
                if not each.done and each.batch is None:
                    each.completed = self._tick()
                elif each.batch and all(map(self._is_met, each.batch)):
                    for member in each.batch:
                        member.completed = self._tick()

    def other_side(self, call):
        """Returns the call of the message's other side, None if the peer has not made it."""
        sides = self.sides[call.route, call.number]
        return sides.get("recv" if call.op == "send" else "send")

    def fits(self, call):
        """True if both sides of a message are called, with one size and dtype."""
        other = self.other_side(call)
        return other is not None and (other.numel, other.dtype) == (call.numel, call.dtype)

    def _is_met(self, call):
        return call.issued and self.fits(call)

    def awaited(self, call):
        """Returns the ranks that have not called their side of this call; none if it has ended."""
        if call.done:
            return set()
        if call.is_message:
            return set() if self.other_side(call) else {call.peer}
        return set(call.group.ranks) - self.places[call.group, call.number].keys()

    def open(self, rank):
        """Returns the calls of a rank that have not ended."""
        return [call for call in self.calls[rank] if not call.done]

    def is_blocked(self, rank):
        return not isinstance(self.doing[rank], str)

    @property
    def without_dump(self):
        """The ranks that died."""
        return {rank for rank, what in self.doing.items() if what == "die"}

    def waits(self):
        """Returns {blocked rank: the ranks that block it}."""
        return {
            rank: set().union(*map(self.awaited, self.doing[rank]))
            for rank in self.doing
            if self.is_blocked(rank)
        }

    def culprits(self):
        """Returns the ranks that some call awaits and that are not blocked themselves."""
        awaited = set()
        for rank in self.calls:
            awaited |= set().union(*map(self.awaited, self.open(rank)))
        return {rank for rank in awaited if not self.is_blocked(rank)}

    def mismatches(self):
        """Returns [{rank: call}], the collectives that cannot end, since their calls differ."""
        return [
            place
            for place in self.places.values()
            if len({call.signature for call in place.values()}) > 1
        ]

    def misfits(self):
        """Returns [(send, receive)], the messages whose sides differ in size or dtype."""
        return [
            (sides["send"], sides["recv"])
            for sides in self.sides.values()
            if len(sides) == 2 and not self.fits(sides["send"])
        ]

    def knots(self):
        """Returns the sets of ranks that block each other; other ranks may block them, too."""
        waits = self.waits()
        reach = {rank: reached_from(waits, rank) for rank in waits}
        knots = {
            frozenset(other for other in reach[rank] & waits.keys() if rank in reach[other])
            for rank in waits
            if rank in reach[rank]
        }
        return sorted(knots, key=sorted)

    def circles(self):
        """Returns the sets of ranks that block each other and that no other rank blocks."""
        waits = self.waits()
        return [knot for knot in self.knots() if all(waits[rank] <= knot for rank in knot)]


def reached_from(waits, start):
    """Returns all ranks for which ``start`` waits, directly or through other ranks."""
    reached, left = set(), [start]
    while left:
        new = waits.get(left.pop(), set()) - reached
        reached |= new
        left += new
    return reached


def under_way(outcome, chance):
    """Reopens a call of one rank: its last, a synchronous collective that has ended on all ranks.

    Dumps of a running job show such calls. Returns False if no rank has such a call.
    """
    last = [calls[-1] for rank, calls in outcome.calls.items() if calls]
    chosen = [
        call
        for call in last
        if call.done and not call.is_message and call.mode == "sync"
        if not outcome.is_blocked(call.rank) and outcome.doing[call.rank] != "die"
    ]
    if not chosen:
        return False
    call = chance.choice(chosen)
    call.completed = -1
    outcome.doing[call.rank] = [call]
    return True
