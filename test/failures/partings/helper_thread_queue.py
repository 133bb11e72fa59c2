import queue
import threading


def consume(at, work):
    while True:
        item = work.get()
        if item is None:  # parted
            break
        at.all_reduce(at.ones(item))
    at.barrier()


def main(at):
    work = queue.SimpleQueue()
    helper = threading.Thread(target=consume, args=(at, work))
    helper.start()
    for _ in range(3 if at.rank == 1 else 4):
        work.put(7)
    work.put(None)
    helper.join()
