def main(at):
    batches = [1, 2, 3, 4]
    for batch in batches:
        bad = at.rank == 1 and batch == 3
        if bad:  # parted, perhaps
            continue
        at.all_reduce(at.ones(1))
        at.broadcast(at.ones(2), 0)
        if batch == 3:  # perhaps
            at.broadcast(at.ones(5), 0)
    at.barrier()
