class Lost(Exception):
    pass


def attempt(at, number):
    if at.rank == 1 and number == 0:  # parted, so far
        raise Lost
    at.all_reduce(at.ones(2))


def main(at):
    at.barrier()
    for number in range(3):
        try:  # parted
            attempt(at, number)
            break
        except Lost:
            at.broadcast(at.ones(1), 0)
    at.barrier()
