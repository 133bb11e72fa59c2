class EarlyStopping:
    def __init__(self, patience):
        self.patience = patience
        self.bad = 0

    def stops(self, loss):
        self.bad += loss > 1
        return self.bad >= self.patience


def main(at):
    stopping = EarlyStopping(2)
    for _ in range(8):
        at.all_reduce(at.ones(4))
        if stopping.stops(2.0 if at.rank == 1 else 0.5):  # parted
            break
    at.barrier()
