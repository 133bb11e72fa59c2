def valid_loss(at, valid):
    if not valid:  # parted
        return
    at.all_reduce(at.ones(1))


def grad_norm(at):
    at.all_reduce(at.ones(1))


def main(at):
    for step in range(6):
        valid_loss(at, valid=not (at.rank == 1 and step == 2))
        grad_norm(at)
    at.barrier()
