def forward(at, layers, value):
    for layer in layers:  # perhaps
        value = layer(at, value)
    return value


def dense(at, value):
    return value


def sharded(at, value):
    if value < 3:  # perhaps
        return value
    at.all_reduce(at.ones(1))
    return value


def main(at):
    for step in range(3):
        forward(at, [dense, sharded, dense], 5 if at.rank == 0 or step != 1 else 1)
        at.barrier()
