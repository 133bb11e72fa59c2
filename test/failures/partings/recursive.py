def visit(at, tree):
    for child in tree:  # perhaps
        visit(at, child)
    if not tree:  # perhaps
        at.all_reduce(at.ones(1))


def main(at):
    visit(at, [[], [[], []], []] if at.rank == 0 else [[], [[], [[]]]])
    at.barrier()
