def steps(at, count):
    for step in range(count):  # parted
        at.all_reduce(at.ones(1))
        yield step


def main(at):
    for _ in steps(at, 3 + at.rank):
        at.all_reduce(at.ones(2))
    at.barrier()
