def main(at):
    for step in range(3):
        fast = step != 1 or at.rank == 0
        at.all_reduce(at.ones(1)) if fast else at.broadcast(at.ones(1), 0)  # parted
