import queue


def main(at):
    work = queue.SimpleQueue()
    for item in range(4 + at.rank):
        work.put(item)
    while not work.empty():  # parted
        work.get()
        at.all_reduce(at.ones(1))
    at.barrier()
