def save(at):
    at.all_reduce(at.ones(1))


def load(at):
    at.broadcast(at.ones(2), 0)


HANDLERS = {"save": save, "load": load}


def main(at):
    for kind in ("load", "save", "load"):
        if at.rank == 1 and kind == "save":
            kind = "load"
        HANDLERS[kind](at)  # parted
