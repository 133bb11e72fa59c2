class Empty(Exception):
    pass


def fetch(at, step):
    if at.rank == 1 and step == 1:
        raise Empty
    return step


def step_of(at, step):
    fetch(at, step)
    at.all_reduce(at.ones(1))


def main(at):
    for step in range(3):
        try:  # parted
            step_of(at, step)
        except Empty:
            at.broadcast(at.ones(9), 0)
