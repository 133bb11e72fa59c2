"""Random programs that end on a CPU, and whether they would under NCCL's rule.

Every call of a program is asynchronous and nobody waits for it, so it ends whatever its order.
Under the rule, as NCCL's user guide has it, a rank's operations run one after another, whatever
group they are of ("Using multiple NCCL communicators concurrently"), and one ends when its peers
have come to theirs; the messages of a batch progress independently ("Point-to-point
communication"). `blocked` runs a program by that, step by step.
"""

import random

from harness import scenes


def make(seed):
    """A scene of 2 to 5 ranks in 1 to 4 groups: in one order on all ranks, then in another."""
    chance = random.Random(seed)
    size = chance.choice((2, 2, 3, 3, 4, 5))
    groups = [scenes.Group("0", list(range(size)), "default_pg")]
    for name in range(1, chance.randint(1, 4)):
        ranks = sorted(chance.sample(range(size), chance.randint(2, size)))
        groups.append(scenes.Group(str(name), ranks))
    scene = scenes.Scene(seed, size, groups, [[] for _ in range(size)])
    for _ in range(chance.randint(2, 8)):
        _add_step(scene, chance)
    for _ in range(chance.choice((0, 1, 1, 2, 3))):
        program = chance.choice(scene.programs)
        if len(program) > 1:
            at = chance.randrange(len(program) - 1)
            program[at : at + 2] = program[at : at + 2][::-1]
    return scene


def _add_step(scene, chance):
    group = chance.choice(scene.groups)
    kind = chance.choice(("collective", "collective", "message", "exchange", "ring", "batches"))
    if kind == "collective":
        for rank in group.ranks:
            _append(scene, scenes.Call(rank, "all_reduce", group, mode="never"))
        return
    length = len(group.ranks) if kind == "ring" else 2
    ring = chance.sample(group.ranks, length)
    for place, rank in enumerate(ring):
        ahead, behind = ring[(place + 1) % length], ring[place - 1]
        send = scenes.Call(rank, "send", group, peer=ahead, mode="never")
        recv = scenes.Call(rank, "recv", group, peer=behind, mode="never")
        if kind == "message":
            _append(scene, send if place == 0 else recv)
        elif kind == "exchange" and place == 0:
            _append(scene, send, recv)
        elif kind == "exchange":
            _append(scene, *chance.choice(((send, recv), (recv, send))))
        else:
            # A rank may put the two into one batch or into two.
            together = kind == "ring" or chance.random() < 0.7
            for batch in ([send, recv],) if together else ([send], [recv]):
                for call in batch:
                    call.batch = batch
                scene.programs[rank].append(batch)


def _append(scene, *calls):
    for call in calls:
        scene.programs[call.rank].append(call)


def steps(outcome, rank):
    """What a rank calls at once: lists of calls."""
    found = []
    for call in outcome.calls[rank]:
        if call.batch is None or call is call.batch[0]:
            found.append([call] if call.batch is None else call.batch)
    return found


def partners(outcome, call):
    """The calls of other ranks that end with this one."""
    if call.is_message:
        return [outcome.other_side(call)]
    return [
        other for other in outcome.places[call.group, call.number].values() if other is not call
    ]


def blocked(outcome):
    """The ranks that come to no end under the rule."""
    left = {rank: steps(outcome, rank) for rank in outcome.calls}
    posted = set()
    moved = True
    while moved:
        moved = False
        for todo in left.values():
            if todo:
                posted.update(todo[0])
        for todo in left.values():
            if todo and all(
                other in posted for call in todo[0] for other in partners(outcome, call)
            ):
                del todo[0]
                moved = True
    return {rank for rank, todo in left.items() if todo}
