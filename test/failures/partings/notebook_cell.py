import linecache
import pathlib

# As ipykernel names a cell's code; no such file exists.
NAME = str(pathlib.Path(__file__).parent / "ipykernel_17.py")

CELL = """
def train_step(at, batch):
    if len(batch) < 2:  # parted
        return
    at.all_reduce(at.ones(1))


def train(at, batches):
    for batch in batches:
        train_step(at, batch)
        at.barrier()
"""


def main(at):
    before = pathlib.Path(__file__).read_text().partition(CELL)[0].count("\n")
    source = "\n" * before + CELL
    linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
    cell = {}
    exec(compile(source, NAME, "exec"), cell)
    cell["train"](at, [[1, 2], [3] if at.rank == 1 else [3, 4], [5, 6]])
