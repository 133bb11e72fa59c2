class Cache:
    def __init__(self, ongoing):
        self.ongoing = ongoing

    def check(self, at):
        if len(self.ongoing) == 0:  # parted
            return
        at.all_reduce(at.ones(1))


def main(at):
    cache = Cache([])
    for step in range(4):
        cache.ongoing = [] if at.rank == 1 and step == 2 else [1, 2, 3]
        cache.check(at)
        at.broadcast(at.ones(2), 0)
