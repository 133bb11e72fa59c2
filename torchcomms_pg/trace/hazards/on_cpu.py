"""Operations that stay on the CPU whatever a program's GPUs do, and so are not NCCL's."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace

from torchcomms_pg.trace.dumps import Dumps, Entry, printable

# torch calls these in a thread, and demands a backend for the CPU (async_save in
# torch/distributed/checkpoint/state_dict_saver.py).
_SAVES = "distributed/checkpoint/_async_thread_executor.py"


def without_cpu(dumps: Dumps) -> tuple[Dumps, list[str]]:
    """Returns the dumps without operations that stay on the CPU, and a line for each reason.

    In a program whose groups all are of backend ``gloo``, Gloo stands for NCCL. A group of ``gloo``
    beside one of another backend stays what it is.
    """
    entries = [entry for dump in dumps.values() for entry in dump.entries]
    # A TorchComm's backend has no name. Other recorders and older dumps have no names.
    others = {entry.backend for entry in entries} - {"gloo"}
    mixed = sorted(name or "a TorchComm" for name in others)
    left: Counter[str] = Counter()

    def stays(entry: Entry) -> bool:
        if entry.backend == "gloo" and mixed:
            name = entry.group.name
            left[f"of group {name}, of gloo beside {', '.join(mixed)}: on the CPU"] += 1
        elif any(frame.file.endswith(_SAVES) for frame in entry.frames):
            left["of DCP's asynchronous save: on the CPU"] += 1
        else:
            return False
        return True

    kept = copy.copy(dumps)
    for rank, dump in dumps.items():
        kept[rank] = replace(dump, entries=[entry for entry in dump.entries if not stays(entry)])
    return kept, [printable(f"{count} operations {why}") for why, count in left.items()]
