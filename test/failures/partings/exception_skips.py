def read(rank, step):
    if rank == 1 and step == 1:
        raise OSError("no such file")
    return 3


def main(at):
    for step in range(3):
        try:  # parted
            size = read(at.rank, step)
            at.all_reduce(at.ones(size))
        except OSError:
            pass
        at.barrier()
