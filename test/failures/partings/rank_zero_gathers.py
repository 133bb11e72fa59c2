def summary(at):
    at.all_reduce(at.ones(1))


def main(at):
    for _ in range(3):
        at.all_reduce(at.ones(4))
    if at.rank == 0:  # parted
        summary(at)
    at.barrier()
