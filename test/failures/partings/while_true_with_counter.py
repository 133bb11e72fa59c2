def main(at):
    done = 0
    limit = 3 if at.rank == 1 else 5
    while True:
        if done >= limit:  # parted
            break
        at.all_reduce(at.ones(1))
        done += 1
    at.barrier()
