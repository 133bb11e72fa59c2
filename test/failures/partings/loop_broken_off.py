def main(at):
    losses = [3.0, 2.0, 1.0, 0.5] if at.rank == 0 else [3.0, 2.0, 0.0, 0.5]
    for loss in losses:
        if loss == 0.0:  # parted
            break
        at.all_reduce(at.ones(1))
    at.barrier()
