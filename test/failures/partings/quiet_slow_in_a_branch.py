def main(at):
    for step in range(6):
        if step % 2:
            at.all_reduce(at.ones(3))
        if at.rank == 1 and step == 4:
            at.away()
        at.all_reduce(at.ones(1))
