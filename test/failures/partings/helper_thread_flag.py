import threading


def main(at):
    flag = threading.Event()
    if at.rank == 1:
        helper = threading.Thread(target=flag.set)
        helper.start()
        helper.join()
    for _ in range(3):
        if flag.is_set():  # parted
            at.barrier()
        at.all_reduce(at.ones(1))
