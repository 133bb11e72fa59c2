def validate(at, interval):
    if interval == 0:  # parted
        return
    at.all_reduce(at.ones(1))


def main(at):
    at.barrier()
    validate(at, 0 if at.rank == 1 else 5)
    if at.rank == 1:
        at.away()
