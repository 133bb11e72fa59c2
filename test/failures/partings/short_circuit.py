def all_agree(at, ok):
    at.all_reduce(at.ones(1))
    return ok


def main(at):
    for step in range(3):
        ok = not (step == 1 and at.rank == 0)
        good = ok and all_agree(at, ok)  # parted
        at.barrier()
    return good
