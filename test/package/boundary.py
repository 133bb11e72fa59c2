"""Goes over the boundary between this project's C++, torch's and Python's, in two processes.

Exceptions are thrown in one of them and caught in another, and threads, futures, streams of text
and the store are used by both sides: what crashes if the extension has a libstdc++ or an unwinder
of its own. Prints a line for each step of rank 0; smoke.py has DDP.

    python test/package/boundary.py
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import torchcomms_pg

RANKS = 2
STEPS: list[Callable[[int], str]] = []


def step(function: Callable[[int], str]) -> Callable[[int], str]:
    STEPS.append(function)
    return function


def raised(call: Callable[[], object]) -> str:
    """Returns type and first line of the exception that a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    raise AssertionError("nothing was raised")


def group() -> dist.ProcessGroup:
    """Makes a group whose failure ends no process."""
    options = torchcomms_pg.Backend.Options()
    options.abort_process_on_timeout_or_error = False
    return dist.new_group(
        list(range(RANKS)),
        backend="torchcomms",
        pg_options=options,
        timeout=datetime.timedelta(seconds=60),
    )


def comm():
    return torchcomms_pg.get_comm(dist.group.WORLD)


@step
def all_reduce(rank):
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [RANKS] * 4
    return "2 ranks"


@step
def exception_of_python_through_our_cxx(rank):
    def refuse(args):
        raise KeyError("refused by a hook")

    hook = comm().register_pre_hook(refuse)
    said = raised(lambda: dist.all_reduce(torch.ones(1)))
    hook.remove()
    assert said.startswith("KeyError"), said
    return said


@step
def callback_of_python_from_our_cxx(rank):
    seen = []
    hook = comm().register_post_hook(seen.append)
    dist.all_reduce(torch.ones(1))
    hook.remove()
    assert len(seen) == 1
    return "a post-hook"


@step
def exception_of_our_cxx_into_python(rank):
    said = raised(lambda: dist.all_reduce(torch.ones(3 + rank), group=group()))
    assert said.startswith("CommError"), said
    return said


@step
def exception_of_torch_through_our_cxx(rank):
    # Raised by torch's checks, which are compiled into this extension, from torch's libraries.
    outputs = [torch.ones(2)] * RANKS
    said = raised(lambda: dist.all_gather(outputs, torch.ones(3), group=group()))
    assert said.split(":")[0] in ("RuntimeError", "ValueError"), said
    return said


@step
def exception_of_the_store_through_our_cxx(rank):
    # Nobody sets the keys that this rank waits for.
    store = dist.PrefixStore(f"alone-{rank}", dist.HashStore())
    store.set_timeout(datetime.timedelta(seconds=1))
    said = raised(
        lambda: torchcomms_pg.new_comm(
            "shm",
            "cpu",
            store=store,
            rank=rank,
            size=RANKS,
            timeout=datetime.timedelta(seconds=1),
            abort_process_on_timeout_or_error=False,
        )
    )
    return said


@step
def exception_of_the_monitors_thread_into_a_waiting_one(rank):
    late = group()
    dist.barrier(late)  # both have come
    late.set_timeout(datetime.timedelta(seconds=1))
    both = dist.PrefixStore("late", dist.distributed_c10d._get_default_store())
    if rank == 1:  # arrives after the other's deadline
        both.wait(["told"], datetime.timedelta(seconds=60))
        return ""
    said = raised(lambda: dist.all_reduce(torch.ones(1), group=late))
    both.set("told", "")
    assert said.startswith("CommError"), said
    return said


@step
def call_from_a_thread_of_python(rank):
    tensors = [torch.ones(1000)]
    thread = threading.Thread(target=dist.all_reduce, args=tensors)
    thread.start()
    thread.join()
    assert tensors[0].sum() == 1000 * RANKS
    return "a thread that ends"


@step
def future_of_torch_in_our_cxx(rank):
    def fail(future):
        raise RuntimeError("raised by a callback")

    work = dist.all_reduce(torch.ones(1), async_op=True)
    future = work.get_future()
    assert future.then(lambda done: done.value()[0].item()).wait() == RANKS
    said = raised(future.then(fail).wait)
    assert "raised by a callback" in said
    return said


@step
def text_and_numbers_of_our_cxx(rank):
    # Streams of libstdc++ and their locales, whose facets have one number in a process.
    dumped = json.loads(torchcomms_pg.hooks.process_recorder().dump_json())
    assert dumped["entries"]
    return f"{len(dumped['entries'])} operations recorded"


def run_rank(rank: int, folder: str) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), RANKS)
    dist.init_process_group("torchcomms", store=store, rank=rank, world_size=RANKS)
    for each in STEPS:
        said = each(rank)
        if rank == 0:
            print(f"{each.__name__}: {said}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    print(f"extension {torchcomms_pg._C.__file__}, torch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory(prefix="torchcomms_pg-boundary-") as folder:
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", os.path.join(folder, "trace_"))
        mp.start_processes(run_rank, args=(folder,), nprocs=RANKS, start_method="fork")
    print(f"{len(STEPS)} steps over the boundary", flush=True)


if __name__ == "__main__":
    sys.exit(main())
