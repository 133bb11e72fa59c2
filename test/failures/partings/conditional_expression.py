def scaled(at, value):
    at.all_reduce(at.ones(1))
    return value


def main(at):
    for step in range(3):
        big = step == 1 and at.rank == 0
        value = scaled(at, 2) if big else 2  # parted
        at.barrier()
    return value
