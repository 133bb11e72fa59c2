def main(at):
    calls = at.rank  # one rank has called more often before
    for _ in range(20):
        calls += 1
        at.all_reduce(at.ones(1))
        if calls % 10 == 0:  # parted
            at.all_reduce(at.ones(7))
