"""The names that programs import from ``torchcomms._comms``."""

from torchcomms_pg._C import EndHookArgs, OpName, PostHookArgs, PreHookArgs, RemovableHandle
from torchcomms_pg.batch import BatchSendRecv
from torchcomms_pg.comm import TorchComm
from torchcomms_pg.creation import new_comm
from torchcomms_pg.options import CommOptions
from torchcomms_pg.reduce_op import RedOpType, ReduceOp
from torchcomms_pg.window import TorchCommWinAccessType, TorchCommWindow, TorchCommWindowAttr
from torchcomms_pg.work import TorchWork, WorkStatus

__all__ = [
    "BatchSendRecv",
    "CommOptions",
    "EndHookArgs",
    "OpName",
    "PostHookArgs",
    "PreHookArgs",
    "RedOpType",
    "ReduceOp",
    "RemovableHandle",
    "TorchComm",
    "TorchCommWinAccessType",
    "TorchCommWindow",
    "TorchCommWindowAttr",
    "TorchWork",
    "WorkStatus",
    "new_comm",
]
