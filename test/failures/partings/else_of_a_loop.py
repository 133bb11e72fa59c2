def main(at):
    for item in [1, 2, 3]:
        at.all_reduce(at.ones(1))
        if item == 3 and at.rank == 1:  # parted
            break
    else:
        at.broadcast(at.ones(2), 0)
    at.barrier()
