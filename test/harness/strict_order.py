"""Makes random programs that end on a CPU, and tells which ranks NCCL's rule would block.

Every call of a program is asynchronous and no rank waits for it, so a program ends in any order of
its calls. By the rule of NCCL's user guide, a rank's operations run one after another, in whichever
groups they are ("Using multiple NCCL communicators concurrently"). An operation ends when all its
peers have begun it. The messages of a batch progress independently ("Point-to-point
communication"). `blocked` runs a program by this rule, step by step.
"""

import random

from harness import scenes


def make(seed):
    """Returns a scene of 2 to 5 ranks in 1 to 4 groups, with up to 3 swaps of adjacent steps."""
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
            # A rank may put the send and the receive into one batch or into two.
            together = kind == "ring" or chance.random() < 0.7
            for batch in ([send, recv],) if together else ([send], [recv]):
                for call in batch:
                    call.batch = batch
                scene.programs[rank].append(batch)


def _append(scene, *calls):
    for call in calls:
        scene.programs[call.rank].append(call)


def steps(outcome, rank):
    """Returns the steps of a rank, in order: lists of the calls that it issues at once."""
    found = []
    for call in outcome.calls[rank]:
        if call.batch is None or call is call.batch[0]:
            found.append([call] if call.batch is None else call.batch)
    return found


def partners(outcome, call):
    """Returns the calls of other ranks that end together with this call."""
    if call.is_message:
        return [outcome.other_side(call)]
    return [
        other for other in outcome.places[call.group, call.number].values() if other is not call
    ]


def blocked(outcome):
    """Returns the ranks whose programs do not end under the rule."""
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
