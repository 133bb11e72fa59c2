import contextlib


def read(at, step):
    if at.rank == 1 and step == 1:
        raise KeyError(step)


def main(at):
    for step in range(3):
        with contextlib.suppress(KeyError):  # parted
            read(at, step)
            at.all_reduce(at.ones(1))
        at.barrier()
