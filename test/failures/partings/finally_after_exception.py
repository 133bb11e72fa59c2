def load(at, step):
    if at.rank == 1 and step == 1:
        raise ValueError("sample 17 is broken")


def main(at):
    try:
        try:  # parted
            for step in range(3):
                load(at, step)
                at.all_reduce(at.ones(4))
        finally:
            at.barrier()
    except ValueError:
        pass
