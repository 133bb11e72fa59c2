def main(at):
    for message in ("go", "go", "stop"):
        if at.rank == 1 and message == "stop":
            message = "pause"
        match message:  # parted
            case "go":
                at.all_reduce(at.ones(1))
            case "stop":
                at.barrier()
            case _:
                at.broadcast(at.ones(3), 0)
