def load(at, step):
    if at.rank == 1 and step == 2:
        at.away()
    return step


def main(at):
    step = 0
    while step < 4:
        if load(at, step) == 1:
            at.all_reduce(at.ones(9))
        at.all_reduce(at.ones(1))
        step += 1
