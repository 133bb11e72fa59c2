def train_step(at, batch):
    if len(batch) < 2:  # parted, unseen
        return
    at.all_reduce(at.ones(1))


def train(at, batches):
    for batch in batches:
        train_step(at, batch)
    at.barrier()


def main(at):
    # By the places alone the loop of rank 1 has ended earlier.
    train(at, [[1, 2], [3] if at.rank == 1 else [3, 4], [5, 6]])
