"""One-sided windows: a rank writes into the tensors of its peers without their help."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import timedelta

import torch

from torchcomms_pg import _C
from torchcomms_pg.handle import Handle
from torchcomms_pg.options import OPERATION_HINTS, Hints, check_hints, check_timeout
from torchcomms_pg.work import TorchWork


class TorchCommWinAccessType(enum.Enum):
    """The way in which a rank reaches the memory of a peer."""

    WIN_ACCESS_TYPE_UNIFIED = 0
    """Like its own memory."""
    WIN_ACCESS_TYPE_SEPARATE = 1
    """By operations only."""


@dataclass(frozen=True)
class TorchCommWindowAttr:
    """Attributes of a window.

    Attributes:
        access_type: the way in which this rank reaches the peer's memory.
    """

    access_type: TorchCommWinAccessType = TorchCommWinAccessType.WIN_ACCESS_TYPE_UNIFIED


class TorchCommWindow(Handle):
    """A tensor of every rank that its peers can write to. Make it by `TorchComm.new_window`.

    `tensor_register` and `tensor_deregister` are collective; the other operations are not, and the
    peer takes no part in them. A put is complete at its destination when a later signal of the same
    rank has arrived: the writer calls ``put``, then ``signal``; the reader calls ``wait_signal``,
    then reads. A put alone sends no signal. Signals are counted for each window and each ordered
    pair of ranks: a wait takes one signal, and signals that arrive before any wait are kept.
    Between a read and the next put to the same place the reader must signal back, or the ranks must
    call a barrier. On a GPU all of this is queued in streams, and the ranks have to do more:
    docs/api.md.

    With ``async_op=True`` operations run in the order of their issue, and an asynchronous
    `wait_signal` holds back the asynchronous operations issued after it. A signal follows all puts
    that this rank issued on the window before it, whether asynchronous or not. Operations of
    windows cannot be part of ``with comm.group():``.

    Thread-safe.

    Example:
        >>> buffer = torch.zeros(3)
        >>> window = comm.new_window(buffer)  # on all ranks
        >>> if rank == 0:
        ...     work = window.put(torch.arange(2.0) + 5, 1, 1)  # to rank 1, from its element 1
        ...     work = window.signal(1)
        ... elif rank == 1:
        ...     work = window.wait_signal(0)
        >>> buffer.tolist() == ([0.0, 5.0, 6.0] if rank == 1 else [0.0, 0.0, 0.0])
        True
        >>> window.tensor_deregister()  # on all ranks
    """

    def __init__(self, window: _C.Window, name: str) -> None:
        self._window = window
        self._name = name

    def __repr__(self) -> str:
        shape = "nothing registered" if self._window.dtype is None else f"{self.dtype} {self.shape}"
        return f"<TorchCommWindow of {self._name!r}: {shape}>"

    def tensor_register(self, tensor: torch.Tensor, owning: bool = True) -> None:
        """Registers `tensor`, which peers then write to. Collective; shapes and dtypes may differ.

        Moves the storage of `tensor`, with its content, into shared memory for good: the tensor,
        its views and all tensors that share the storage are then in that memory. The storage cannot
        be resized afterwards, and its former memory is freed together with it. A tensor of
        `TorchComm.allocate_tensor`, or one that was registered before, is not moved. No operation
        may use the tensor during the call. Autograd does not notice what peers write.

        Args:
            tensor: contiguous; the window is its elements, not its whole storage.
            owning: whether the window keeps the tensor alive. Peers may write in any case.

        Raises:
            ValueError: the tensor is not contiguous, or torch does not own its memory: the memory
                belongs to a NumPy array (also after ``tensor.numpy()``), a file or
                torch.multiprocessing.
            RuntimeError: a tensor is registered with this window already, or the communicator has
                reached its limit of windows with a tensor: 128, or one on a GPU.
        """
        self._window.tensor_register(tensor, owning)

    def tensor_deregister(self) -> None:
        """Ends the registration once no rank writes any more. All ranks call this.

        Waits for the window's asynchronous operations. Drops signals that no wait has taken.
        The tensor keeps its content and stays in shared memory.

        Raises:
            RuntimeError: no tensor is registered.
        """
        self._window.tensor_deregister()

    def put(
        self,
        tensor: torch.Tensor,
        dst_rank: int,
        offset: int,
        async_op: bool = False,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Writes `tensor` to the tensor that rank `dst_rank` has registered.

        When the put is done, `tensor` may be reused.

        Args:
            tensor: of any strides, of the dtype that `dst_rank` has registered.
            dst_rank: may be this rank.
            offset: index of the first element written, in the registered tensor.
            async_op: whether to return at once.
            hints: see docs/api.md.
            timeout: from issue to end. By default the communicator's.

        Raises:
            TypeError: the dtype differs from the registered one.
            ValueError: the rank does not exist, or has not registered that many elements.
            RuntimeError: no tensor is registered.
        """
        self._check("put", hints, timeout)
        return TorchWork(self._window.put(tensor, dst_rank, offset, async_op, timeout))

    def signal(
        self,
        dst_rank: int,
        async_op: bool = False,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Adds one to rank `dst_rank`'s count of signals from this rank. Arguments: see `put`."""
        self._check("signal", hints, timeout)
        return TorchWork(self._window.signal(dst_rank, async_op, timeout))

    def wait_signal(
        self,
        peer_rank: int,
        async_op: bool = False,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Waits for a signal of rank `peer_rank` and takes it. Arguments: see `put`.

        All data that the peer put before the signal has then arrived.
        """
        self._check("wait_signal", hints, timeout)
        return TorchWork(self._window.wait_signal(peer_rank, async_op, timeout))

    def map_remote_tensor(self, rank: int) -> torch.Tensor:
        """Returns the tensor that `rank` has registered: its memory itself, not a copy.

        Either rank sees the other's writes at once; `signal` and `wait_signal` order them. In
        shared memory the returned tensor keeps the memory alive, so it stays valid even after the
        window, the communicator and the peer have ended. On a GPU it is valid until the peer's
        tensor is deregistered.

        Raises:
            ValueError: the rank does not exist.
            RuntimeError: no tensor is registered.
        """
        return self._window.map_remote_tensor(rank)

    def get_attr(self, peer_rank: int) -> TorchCommWindowAttr:
        """Returns how this rank reaches rank `peer_rank`'s memory: always as its own."""
        self._window.check_rank("get_attr", "peer_rank", peer_rank)
        return TorchCommWindowAttr(TorchCommWinAccessType.WIN_ACCESS_TYPE_UNIFIED)

    def get_size(self) -> int:
        """Returns the number of bytes that this rank has registered, or 0 if none."""
        dtype, shape = self._window.dtype, self._window.shape
        if dtype is None or shape is None:
            return 0
        return torch.Size(shape).numel() * dtype.itemsize

    def get_tensor(self) -> torch.Tensor | None:
        """Returns this rank's registered tensor; None if none is registered or it is not owned."""
        return self._window.tensor

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of this rank's registered tensor. Raises RuntimeError if none is registered."""
        if self._window.dtype is None:
            raise RuntimeError("dtype: no tensor is registered with this window")
        return self._window.dtype

    @property
    def shape(self) -> list[int]:
        """The shape of this rank's registered tensor. Raises RuntimeError if none is registered."""
        if self._window.shape is None:
            raise RuntimeError("shape: no tensor is registered with this window")
        return self._window.shape

    @property
    def device(self) -> torch.device:
        """The device of the registered tensors."""
        return self._window.device

    def _check(self, what: str, hints: Hints | None, timeout: timedelta | None) -> None:
        if timeout is not None:
            check_timeout(what, timeout)
        if hints is not None:
            check_hints(what, hints, OPERATION_HINTS)
