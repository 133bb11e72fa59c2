"""The c10d backend ``torchcomms``: collectives over NCCL, shared memory and Gloo.

``import torchcomms_pg`` registers the backend; then ``dist.init_process_group("torchcomms")``
trains DDP and FSDP models. `new_comm` makes a communicator without process groups.
"""

from torchcomms_pg._compat import load_extension, runs_apart

__all__ = [
    "Backend",
    "BatchSendRecv",
    "CommError",
    "CommOptions",
    "NcclConfig",
    "OpName",
    "RankLateness",
    "RedOpType",
    "ReduceOp",
    "RemovableHandle",
    "TorchComm",
    "TorchCommWinAccessType",
    "TorchCommWindow",
    "TorchCommWindowAttr",
    "TorchWork",
    "WorkStatus",
    "__version__",
    "agree",
    "device_mesh",
    "env",
    "get_comm",
    "get_process_group",
    "hooks",
    "lateness",
    "nccl",
    "new_comm",
    "objcol",
    "register",
    "waiting",
    "watch",
]


def __dir__() -> list[str]:
    """Returns the names that completion shows: public ones, without the modules they are in."""
    return [*__all__, "__doc__", "__file__", "__name__", "__path__"]


if not runs_apart():
    import torch

    load_extension(torch.__version__)

    # The following modules use the extension.
    from torchcomms_pg import _C, as_gloo, device_mesh, env, hooks, nccl, objcol
    from torchcomms_pg._C import Backend, NcclConfig, OpName, RemovableHandle
    from torchcomms_pg._version import __version__
    from torchcomms_pg.agreement import agree
    from torchcomms_pg.batch import BatchSendRecv
    from torchcomms_pg.comm import TorchComm
    from torchcomms_pg.creation import get_comm, new_comm
    from torchcomms_pg.diagnosis import python_stacks, waits
    from torchcomms_pg.diagnosis.late_ranks import RankLateness, lateness
    from torchcomms_pg.diagnosis.waits import waiting
    from torchcomms_pg.diagnosis.watching import watch, watch_as_told
    from torchcomms_pg.errors import CommError
    from torchcomms_pg.options import CommOptions
    from torchcomms_pg.parting import answers
    from torchcomms_pg.process_group import get_process_group
    from torchcomms_pg.reduce_op import RedOpType, ReduceOp
    from torchcomms_pg.registration import register
    from torchcomms_pg.window import (
        TorchCommWinAccessType,
        TorchCommWindow,
        TorchCommWindowAttr,
    )
    from torchcomms_pg.work import TorchWork, WorkStatus

    _C.set_comm_error(CommError)
    _C.set_python_stack_source(python_stacks.describe)
    _C.set_parting_source(answers.answer)
    if env.branches():
        answers.record_branches()
    register()
    waits.install()
    if env.as_gloo():
        as_gloo.install()
    watch_as_told()
    if env.check_async():
        from torchcomms_pg import check_async

        check_async.start_as_told()
