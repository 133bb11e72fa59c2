def main(at):
    for step in range(3):
        micro_batches = 3 if at.rank == 1 and step == 1 else 4
        for _ in range(micro_batches):  # parted
            at.all_reduce(at.ones(8))
        at.barrier()
