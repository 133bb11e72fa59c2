def main(at):
    for _ in range(5):
        if at.rank == 0:
            at.broadcast(at.ones(2), 0)
        else:
            at.broadcast(at.ones(2), 0)
        at.all_reduce(at.ones(1))
