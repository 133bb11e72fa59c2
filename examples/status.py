"""While a job runs or hangs, a command says who waits for whom; NCCL's client `ncclras` gets the same.

Rank 0 asks here. A user asks from another terminal: `python -m torchcomms_pg.status` and `ncclras -p 28100`.

$ TORCHCOMMS_PG_RAS_ADDR=localhost:28100 torchrun --nproc-per-node 2 examples/status.py
group '0' (default_pg, torchcomms), ranks 0, 1: 1 collective completed; all_reduce #2 (4 x Float, SUM) has been waited for 1.1 s
  verdict on group '0', 2 ranks: rank 1 has not arrived at all_reduce #2 (4 x Float, SUM), issued 1.1 s ago
    rank 1: last completed all_reduce #1 (4 x Float, SUM) in this group
        MainThread: examples/status.py:51 in validate
    rank 0: in all_reduce #2 (4 x Float, SUM), called at examples/status.py:63 in main
Job summary
"""

import os
import socket
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist

import torchcomms_pg  # noqa: F401


def ask_status():
    command = [sys.executable, "-m", "torchcomms_pg.status", str(os.getpid()), "--late", "0.5"]
    command += ["--wait", "9"]  # at most 9 s for a rank that does not answer
    print(subprocess.run(command, capture_output=True, text=True, check=False).stdout)


def connect():
    host, port = os.environ["TORCHCOMMS_PG_RAS_ADDR"].rsplit(":", 1)
    for _ in range(80):
        try:
            return socket.create_connection((host, int(port)))
        except ConnectionRefusedError:  # the process that answers is starting
            time.sleep(0.1)
    raise TimeoutError(f"nothing answers at {host}:{port}")


def ask_ras():
    with connect() as client:
        client.sendall(b"client protocol 2\nstatus\n")
        while part := client.recv(4096):
            print(part.decode(), end="", flush=True)


def validate():
    time.sleep(10)  # rank 1 validates, and the others wait for it


def main():
    dist.init_process_group("torchcomms")
    dist.all_reduce(torch.ones(4))
    asking = [threading.Timer(1, ask_status), threading.Timer(2, ask_ras)]
    if dist.get_rank() == 1:
        validate()
    else:
        for each in asking:
            each.start()
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
