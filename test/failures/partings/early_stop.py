def main(at):
    best = 10.0
    for epoch in range(6):
        at.all_reduce(at.ones(4))
        loss = 5.0 if at.rank == 0 else 20.0
        if loss > best and epoch == 2:  # parted
            break
        at.all_reduce(at.ones(5))
    at.barrier()
