def names_of(at):
    return ["a", "b", "c"] if at.rank == 0 else ["c", "a", "b"]  # the order of a set


def main(at):
    sizes = {"a": 1, "b": 2, "c": 3}
    for name in names_of(at):  # parted
        at.all_reduce(at.ones(sizes[name]))
    at.barrier()
