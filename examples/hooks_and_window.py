"""Hooks see each operation of a communicator; a window lets one rank write into another's memory.

$ torchrun --nproc-per-node 2 examples/hooks_and_window.py
before all_reduce 1
after it: [2.0, 2.0, 2.0, 2.0]
rank 1 has written [7.0, 7.0] into rank 0
"""

import torch

import torchcomms_pg


def main():
    comm = torchcomms_pg.new_comm("shm", "cpu")  # rank, size and store are torchrun's
    tensor = torch.ones(4)
    hooks = [
        comm.register_pre_hook(lambda args: print(f"before {args.name.name} {args.op_id}")),
        comm.register_post_hook(lambda args: print(f"after it: {tensor.tolist()}")),
    ]
    comm.all_reduce(tensor, torchcomms_pg.ReduceOp.SUM)
    for each in hooks:
        each.remove()

    memory = torch.zeros(2)
    window = comm.new_window(memory)  # on all ranks
    if comm.get_rank() == 1:
        window.put(torch.full((2,), 7.0), 0, 0, async_op=False)  # to rank 0, from its element 0 on
        window.signal(0, async_op=False)
    else:
        window.wait_signal(1, async_op=False)
        print(f"rank 1 has written {memory.tolist()} into rank 0")
    window.tensor_deregister()
    comm.finalize()


if __name__ == "__main__":
    main()
