from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar, overload

import torch
from torch._C._distributed_c10d import Backend as _C10dBackend
from torch._C._distributed_c10d import ErrorType, ProcessGroup, Store
from torch._C._distributed_c10d import ReduceOp as _ReduceOp
from torch._C._distributed_c10d import Work as _Work

from torchcomms_pg.work import TorchWork

# The minor of torch that the extension was compiled for, such as "2.15".
torch_version: str
# NCCL_VERSION_CODE of the header it was compiled with.
nccl_header_version: int
# Whether c10d calls hooks for the operations of every group.
groups_have_hooks: bool
# The attributes of NcclConfig, by their own names and by those of NCCL's fields.
nccl_config_names: dict[str, str]

def set_comm_error(type: type[Exception]) -> None:
    """Names the class that failures on the wire are raised as."""

def set_python_stack_source(
    describe: Callable[[list[list[tuple[str, int, str]]]], tuple[str, list[str]]],
) -> None:
    """Names the function that tells the places of this process's Python threads, and of stacks."""

def set_waiting_functions(functions: Sequence[Callable[..., object]]) -> None:
    """Names functions that wait for the end of what they issue asynchronously."""

class _RankLateness:
    @property
    def later(self) -> float: ...
    @property
    def share(self) -> float: ...

class _Lateness:
    """A judgement; see `RankLateness` in torchcomms_pg/late_ranks.py."""

    @property
    def ranks(self) -> list[_RankLateness]: ...
    @property
    def collectives(self) -> int: ...
    @property
    def seconds(self) -> float:
        """Time in which those were."""

    @property
    def late(self) -> int | None: ...

def set_late_warning(on: bool) -> None:
    """Sets whether rank 0 of a group warns of one that is always late."""

class Watch:
    """The watch over one process group, as long as that lives."""

    def set_timeout(self, timeout: timedelta) -> None: ...
    def lateness(self, operation: str) -> _Lateness:
        """Judges what the ranks have told of their arrivals; `operation` is named in errors."""

    def close(self) -> None:
        """Forgets the group, which is destroyed. Idempotent."""

def watch(
    *, group: ProcessGroup, ranks: Sequence[int], devices: Sequence[str], timeout: timedelta
) -> Watch:
    """Watches the group's operations on these types of devices; `ranks`: the global ones."""

class OperationTotals:
    """Sums over the operations of one name that have ended in a group."""

    @property
    def name(self) -> str: ...
    @property
    def ended(self) -> int: ...
    @property
    def failures(self) -> int: ...
    @property
    def bytes(self) -> int:
        """Size of their input or output, the larger of both."""
    @property
    def seconds(self) -> float:
        """Time from issue to end; at least that where ends are asked for."""
    @property
    def waited(self) -> float:
        """Seconds for which threads of the program were blocked."""

class GroupTotals:
    """What the groups of one name and backend have done in this process."""

    @property
    def name(self) -> str: ...
    @property
    def backend(self) -> str: ...
    @property
    def watched(self) -> bool: ...
    @property
    def live(self) -> bool:
        """Whether one of them has not ended."""
    @property
    def in_flight(self) -> int: ...
    @property
    def oldest(self) -> float:
        """Seconds since the issue of the oldest operation in flight; 0: there is none."""
    @property
    def failures(self) -> int:
        """Failures of these groups; of watched ones, verdicts."""
    @property
    def lateness(self) -> list[_RankLateness]:
        """By rank, as this one has judged it last; empty: it has not."""
    @property
    def operations(self) -> list[OperationTotals]: ...

class ProcessTotals:
    """What all groups have done in this process."""

    @property
    def rank(self) -> int:
        """The global one in the first group; -1: there has been none."""
    @property
    def groups(self) -> list[GroupTotals]: ...

def process_totals() -> ProcessTotals: ...
def await_failure(written: int, patience: timedelta) -> int | None:
    """Waits for the next failure after the first `written`, but no longer than `patience`.

    Returns the number of failures; None: `end_metrics_writer` was called.
    """

def end_metrics_writer() -> None:
    """Ends `await_failure`, now and later."""

def compile_began(trigger: str) -> None:
    """Says that this process compiles from now on; calls may nest."""

def compile_ended() -> None: ...
def watch_over_monitor(patience: timedelta, ends_process: bool) -> None:
    """Says on stderr when the monitor's thread is stuck, or the GIL held, for that long; 0: not."""

def set_status(folder: str, ras: str, run: str) -> None:
    """Names the folder with the processes' sockets, the address for RAS, and the run; "": none."""

def set_compile_limit(limit: timedelta) -> None:
    """Sets how much longer than its deadline an operation waits for ranks that compile."""

def set_work_type(type: type[TorchWork]) -> None:
    """Names the class that hooks get a work as."""

def work_state(work: _Work) -> str:
    """The name of the work's `WorkStatus`."""

def work_error(work: _Work) -> BaseException | None:
    """The error of the work; None while it runs and when it succeeded."""

def work_wait_blocking(work: _Work, timeout: timedelta | None) -> None:
    """Same as ``work.wait``, but on an accelerator, too, the calling thread waits."""

def refuse_nan(args: PreHookArgs, rank: int) -> None:
    """Raises RuntimeError, naming operation and tensor, where `rank` would send NaN."""

def log_info(text: str) -> None:
    """Writes a line to torch's log, where TORCH_CPP_LOG_LEVEL is INFO."""

def configure_recorder(
    *,
    max_entries: int,
    cpp_stacks: bool,
    prefix: str,
    on_failure: bool,
    patience: timedelta,
    stacks: bool,
    completed: bool,
    pipe: str,
) -> None:
    """Makes the recorder of this process, or changes how it is dumped after a failure."""

def process_recorder() -> Recorder | None:
    """Returns the recorder of this process; None where it is off or was not made."""

class Recorder:
    """The object behind `FlightRecorderHook`; see there."""

    def __init__(self, max_entries: int, cpp_stacks: bool) -> None: ...
    @property
    def enabled(self) -> bool: ...
    @property
    def size(self) -> int: ...
    @property
    def rank(self) -> int:
        """This process's rank in the first group that was recorded; -1: none was."""
    def reset(self) -> None: ...
    def json(self, completed: bool = True, collectives: bool = True) -> str: ...
    def write(
        self, path: str, completed: bool = True, collectives: bool = True, stacks: bool = True
    ) -> None:
        """Writes the pickle to a file; raises RuntimeError when it cannot."""

def keep_store(store: Store) -> None:
    """Keeps the store, and what it serves, until the process is gone."""

def new_host_communicator(
    store: Store,
    rank: int,
    size: int,
    name: str,
    timeout: timedelta,
    ends_process: bool,
    gloo: bool,
) -> Communicator:
    """A communicator for CPU tensors, over shared memory or the connections of torch's Gloo.

    Collective over its ranks.
    """

def new_accelerator_communicator(
    store: Store,
    rank: int,
    size: int,
    name: str,
    timeout: timedelta,
    ends_process: bool,
    device: torch.device,
    nccl_library: str,
    nccl_folder: str,
    high_priority: bool,
    config: NcclConfig,
    named: bool,
    ranks_per_root: int,
) -> Communicator:
    """A communicator for tensors of the device; collective over its ranks.

    `nccl_library` is a path, `nccl_folder` the folder of the installed package; empty: none.
    `named`: NCCL is told the name, where it takes one.
    """

def use_host_streams(device_type: str, library: str) -> None:
    """Makes shared memory carry the tensors of a simulated accelerator, or a library if named."""

def load_nccl(path: str, folder: str) -> NcclLibrary:
    """Loads libnccl, see `torchcomms_pg.nccl.load`; empty strings: none."""

def meet_over_nccl(
    library: NcclLibrary,
    store: Store,
    rank: int,
    size: int,
    name: str,
    timeout: timedelta,
    ranks_per_root: int,
    peer: int = -1,
) -> list[bytes]:
    """The unique ids of a new communicator, for its ranks; they must have one version of NCCL."""

class NcclConfig:
    """Settings of a communicator for NCCL: the fields of its ``ncclConfig_t``.

    Attributes have the names of torch's ``ProcessGroupNCCL.NCCLConfig``; None is NCCL's default.
    What they mean: NCCL's documentation. NCCL's environment variables go first. A value that NCCL
    does not take raises ValueError; so does, when a communicator is made, a field that the loaded
    library does not have yet.

    Attributes:
        blocking: None or 0: communicators never block, since deadlines and abort depend on it.
        net_name: the network plugin's; a name, as `comm_name`.
    """

    blocking: int | None
    cga_cluster_size: int | None
    min_ctas: int | None
    max_ctas: int | None
    net_name: str | None
    split_share: int | None
    traffic_class: int | None
    comm_name: str | None
    collnet_enable: int | None
    cta_policy: int | None
    shrink_share: int | None
    nvls_ctas: int | None
    n_channels_per_net_peer: int | None
    nvlink_centric_sched: int | None
    graph_usage_mode: int | None
    num_rma_ctx: int | None
    max_p2p_peers: int | None
    graph_stream_ordering: int | None
    launch_order_implicit: int | None
    num_rma_sig: int | None
    rma_eager_init: int | None
    host_cft_mode: int | None
    nvls_host_mode: int | None

    def __init__(self) -> None: ...
    def __copy__(self) -> NcclConfig: ...
    def __deepcopy__(self, memo: dict[int, Any]) -> NcclConfig: ...

def allocate_with(library: NcclLibrary) -> None:
    """Makes the extension's functions for torch.cuda.CUDAPluggableAllocator use the library."""

class NcclLibrary:
    """A loaded libnccl."""

    @property
    def path(self) -> str: ...
    @property
    def version(self) -> int:
        """The version as ncclGetVersion tells it, e.g. 23007 for 2.30.7."""

    @property
    def origin(self) -> str:
        """The way in which it was found, in words."""

    @property
    def missing(self) -> list[str]:
        """The optional functions that it lacks."""

class OpName:
    """The operation that a hook is told of."""

    @property
    def __members__(self) -> dict[str, OpName]: ...
    send: ClassVar[OpName]
    recv: ClassVar[OpName]
    broadcast: ClassVar[OpName]
    all_reduce: ClassVar[OpName]
    reduce: ClassVar[OpName]
    all_gather: ClassVar[OpName]
    all_gather_v: ClassVar[OpName]
    all_gather_single: ClassVar[OpName]
    reduce_scatter: ClassVar[OpName]
    reduce_scatter_v: ClassVar[OpName]
    reduce_scatter_single: ClassVar[OpName]
    all_to_all: ClassVar[OpName]
    all_to_all_single: ClassVar[OpName]
    all_to_all_v_single: ClassVar[OpName]
    barrier: ClassVar[OpName]
    scatter: ClassVar[OpName]
    gather: ClassVar[OpName]
    gather_single: ClassVar[OpName]
    batch_op_issue: ClassVar[OpName]
    split: ClassVar[OpName]
    shrink: ClassVar[OpName]
    new_window: ClassVar[OpName]
    tensor_register: ClassVar[OpName]
    tensor_deregister: ClassVar[OpName]
    put: ClassVar[OpName]
    signal: ClassVar[OpName]
    wait_signal: ClassVar[OpName]
    finalize: ClassVar[OpName]

    def __init__(self, value: int) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class PreHookArgs:
    """An operation that is about to be launched.

    Attributes:
        name: which operation.
        op_id: counts the hooked operations of this process.
        async_op: as the caller passed it.
        inputs: the tensors it reads; what is contiguous in them is what is sent.
        outputs: the tensors it writes.
        input: the only tensor of `inputs`, or all of them where there is not exactly one.
        output: the same for `outputs`.
        tensors: inputs and outputs, each once.
        tensor: the only tensor of `tensors`, None where there is not exactly one.
        root: of a rooted collective; None for others.
        peer: other side of a message, put or signal, -1 for a receive from any; None for others.
        reduce_op: such as ``"SUM"``; None where nothing is reduced.
        input_split_sizes: rows for each rank, of all_to_all_v_single; empty for others.
        output_split_sizes: the same for the output.
        ops: of a batch: its members, with the op_id of the batch.
        num_ops: how many these are.
        ranks: of a split or shrink: the ranks of the new communicator, as they are called in this
            one; empty: this rank is in none.
        new_name: of a split or shrink: what the new communicator is called.
    """

    @property
    def name(self) -> OpName: ...
    @property
    def op_id(self) -> int: ...
    @property
    def async_op(self) -> bool: ...
    @property
    def inputs(self) -> list[torch.Tensor]: ...
    @property
    def outputs(self) -> list[torch.Tensor]: ...
    @property
    def input(self) -> torch.Tensor | list[torch.Tensor]: ...
    @property
    def output(self) -> torch.Tensor | list[torch.Tensor]: ...
    @property
    def tensors(self) -> list[torch.Tensor]: ...
    @property
    def tensor(self) -> torch.Tensor | None: ...
    @property
    def root(self) -> int | None: ...
    @property
    def peer(self) -> int | None: ...
    @property
    def reduce_op(self) -> str | None: ...
    @property
    def input_split_sizes(self) -> list[int]: ...
    @property
    def output_split_sizes(self) -> list[int]: ...
    @property
    def ops(self) -> list[PreHookArgs]: ...
    @property
    def num_ops(self) -> int: ...
    @property
    def ranks(self) -> list[int]: ...
    @property
    def new_name(self) -> str: ...

class PostHookArgs:
    """An operation that was launched, cancelled by a pre-hook, or could not be launched.

    Attributes:
        name: which operation.
        op_id: as in `PreHookArgs`.
        work: of the operation; None when it was not launched, and for finalize.
        error: why it was not launched, or what a synchronous operation failed with; None if
            nothing went wrong.
    """

    @property
    def name(self) -> OpName: ...
    @property
    def op_id(self) -> int: ...
    @property
    def work(self) -> TorchWork | None: ...
    @property
    def error(self) -> BaseException | None: ...

class EndHookArgs:
    """An operation that has come to its end.

    Attributes:
        name: which operation.
        op_id: as in `PreHookArgs`.
        async_op: as in `PreHookArgs`.
        status: ``"completed"`` or ``"failed"``.
        error: what it failed with, else None.
        duration: milliseconds from its start to its end; 0 if it was never started.
    """

    @property
    def name(self) -> OpName: ...
    @property
    def op_id(self) -> int: ...
    @property
    def async_op(self) -> bool: ...
    @property
    def status(self) -> str: ...
    @property
    def error(self) -> BaseException | None: ...
    @property
    def duration(self) -> float: ...

class RemovableHandle:
    """Takes one hook away."""

    def remove(self) -> None:
        """Ends calls of the hook, from the next operation on. Idempotent."""

class Communicator:
    """The object behind `TorchComm`; see there for the operations."""

    def register_pre_hook(self, hook: Callable[[PreHookArgs], object]) -> RemovableHandle: ...
    def register_post_hook(self, hook: Callable[[PostHookArgs], object]) -> RemovableHandle: ...
    def register_end_hook(self, hook: Callable[[EndHookArgs], object]) -> RemovableHandle: ...
    def register_abort_hook(self, hook: Callable[[], object]) -> RemovableHandle: ...
    def record(self, recorder: Recorder) -> bool:
        """Records the operations from the next one on; False: it does already, or is off."""

    def stop_recording(self, recorder: Recorder) -> None:
        """Ends what `record` began. Idempotent."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def ranks(self) -> list[int]: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def library_version(self) -> str:
        """The library's version as NCCL counts, e.g. ``"2.28.9"``."""

    @property
    def failed(self) -> bool: ...
    def lateness(self, operation: str) -> _Lateness:
        """Judges what the ranks have told of their arrivals; `operation` is named in errors."""

    @property
    def ends_process(self) -> bool:
        """True if a failure ends the process."""

    @property
    def timeout(self) -> timedelta: ...
    @timeout.setter
    def timeout(self, arg1: timedelta) -> None: ...
    @property
    def splits(self) -> int:
        """Number of splits so far, the same on every rank."""

    def enable_timing(self) -> None: ...
    def split(
        self,
        ranks: Sequence[int],
        name: str,
        timeout: timedelta | None,
        config: NcclConfig | None,
        named: bool,
    ) -> Communicator | None: ...
    def comm_ptr(self) -> int:
        """The library's communicator, once all ranks have joined."""

    def new_window(self) -> Window: ...
    def allocate_tensor(self, size: int, dtype: torch.dtype) -> torch.Tensor: ...
    def enter_batch(self) -> int | None:
        """Opens a batch in this thread, or returns how many operations the open one has."""

    def leave_batch(self, joined: int | None) -> _Work | None:
        """Ends what `enter_batch` has begun, with its result; launches a batch that it opened."""

    def cancel_batch(self, joined: int | None) -> None:
        """Same as `leave_batch`, dropping the operations since `enter_batch`."""

    @property
    def in_batch(self) -> bool:
        """Whether the calling thread has a batch open."""

    def abort(self, why: str) -> None: ...
    def close(self) -> None: ...
    def relax(self, time: timedelta) -> int:
        """Makes peers wait for this rank that much longer from now.

        Returns what `end_relaxation` takes, which ends it before.
        """

    def end_relaxation(self, end: int) -> None: ...
    def send(
        self,
        tensor: torch.Tensor,
        dst: int,
        tag: int,
        async_op: bool,
        timeout: timedelta | None,
    ) -> _Work | None: ...
    def recv(
        self,
        tensor: torch.Tensor,
        src: int,
        tag: int,
        async_op: bool,
        timeout: timedelta | None,
    ) -> _Work | None: ...
    def broadcast(
        self,
        tensor: torch.Tensor,
        root: int,
        async_op: bool,
        timeout: timedelta | None,
    ) -> _Work | None: ...
    def all_reduce(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: _ReduceOp,
        async_op: bool,
        timeout: timedelta | None,
    ) -> _Work | None: ...
    def reduce(
        self,
        tensor: torch.Tensor,
        root: int,
        op: _ReduceOp,
        async_op: bool,
        timeout: timedelta | None,
    ) -> _Work | None: ...
    def all_gather(
        self,
        outputs: Sequence[torch.Tensor],
        input: torch.Tensor,
        async_op: bool,
        timeout: timedelta | None,
    ) -> _Work | None: ...
    def all_gather_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        async_op: bool,
        timeout: timedelta | None,
    ) -> _Work | None: ...
    def reduce_scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        op: _ReduceOp,
        async_op: bool,
        timeout: timedelta | None,
    ) -> _Work | None: ...
    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: _ReduceOp,
        async_op: bool,
        timeout: timedelta | None,
    ) -> _Work | None: ...
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        async_op: bool,
        timeout: timedelta | None,
    ) -> _Work | None: ...
    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        async_op: bool,
        timeout: timedelta | None,
    ) -> _Work | None: ...
    def barrier(
        self,
        async_op: bool,
        timeout: timedelta | None,
    ) -> _Work | None: ...
    def scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        root: int,
        async_op: bool,
        timeout: timedelta | None,
    ) -> _Work | None: ...
    def gather(
        self,
        outputs: Sequence[torch.Tensor],
        input: torch.Tensor,
        root: int,
        async_op: bool,
        timeout: timedelta | None,
    ) -> _Work | None: ...
    def gather_single(
        self,
        output: torch.Tensor | None,
        input: torch.Tensor,
        root: int,
        async_op: bool,
        timeout: timedelta | None,
    ) -> _Work | None: ...

class Window:
    """The object behind `TorchCommWindow`; see there for the operations."""

    def tensor_register(self, tensor: torch.Tensor, owning: bool) -> None: ...
    def tensor_deregister(self) -> None: ...
    def put(
        self,
        tensor: torch.Tensor,
        dst_rank: int,
        offset: int,
        async_op: bool,
        timeout: timedelta | None,
    ) -> _Work | None: ...
    def signal(self, dst_rank: int, async_op: bool, timeout: timedelta | None) -> _Work | None: ...
    def wait_signal(
        self, peer_rank: int, async_op: bool, timeout: timedelta | None
    ) -> _Work | None: ...
    def map_remote_tensor(self, rank: int) -> torch.Tensor: ...
    def check_rank(self, what: str, argument: str, rank: int) -> None: ...
    @property
    def tensor(self) -> torch.Tensor | None: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype | None: ...
    @property
    def shape(self) -> list[int] | None: ...

class Work(_Work):
    """One issued operation. Its repr tells operation, sizes, group, rank, timeout and state."""

    def __copy__(self) -> Work: ...
    def __deepcopy__(self, memo: dict[int, Any]) -> Work: ...

class Backend(_C10dBackend):
    """The ranks of one process group.

    ``dist.init_process_group("torchcomms")`` and ``dist.new_group`` make it. Made by hand it
    can be used without a process group; that too is collective over its ranks.

    Args:
        store: where the ranks meet.
        rank: of this process or thread, from 0.
        size: number of ranks.
        options: timeout and name of the group.
        communicator: instead of the first three: one that there is already, and that lives on when
            the group is shut down.

    Raises:
        CommError: not all ranks came within ``options._timeout``.
    """

    class Options(_C10dBackend.Options):
        """Options that ``pg_options`` of ``init_process_group`` takes for this backend.

        Args:
            timeout: how long an operation may take, from its issue, before the group fails.
            name: by which profiles and `Backend.name` call the backend; ``gloo``: as Gloo's.

        Attributes:
            nccl_library: path of the libnccl.so.2 to load. Empty: see `torchcomms_pg.nccl.load`.
            nccl_folder: folder of the installed NCCL package; set by the backend's creator.
            is_high_priority_stream: whether asynchronous operations of an accelerator run in a
                stream of high priority.
            config: what NCCL is told when it makes a communicator. Groups that are made of this
                one have it too, unless they get options of their own.
            ranks_per_root: for how many ranks NCCL starts from one unique id; set by the
                backend's creator.
            blocking_wait: whether ``work.wait()`` stops the host on an accelerator, too; set by the
                backend's creator.
            nan_check: whether operations that would send NaN raise; set by the backend's creator.
        """

        nccl_library: str
        nccl_folder: str
        is_high_priority_stream: bool
        config: NcclConfig
        ranks_per_root: int

        def __init__(self, timeout: timedelta = ..., name: str = ...) -> None: ...
        blocking_wait: bool
        nan_check: bool
        @property
        def abort_process_on_timeout_or_error(self) -> bool | None:
            """True if a failure ends the process, after the abort hooks; else it raises CommError.

            None: TORCHCOMM_ABORT_ON_ERROR; where that is not set, it raises for CPU tensors, and
            for an accelerator's TORCH_NCCL_ASYNC_ERROR_HANDLING says.
            """

        @abort_process_on_timeout_or_error.setter
        def abort_process_on_timeout_or_error(self, arg0: bool | None) -> None: ...
        @property
        def accelerator_ends_process(self) -> bool:
            """The choice of TORCH_NCCL_ASYNC_ERROR_HANDLING; set by torchcomms_pg."""

        @accelerator_ends_process.setter
        def accelerator_ends_process(self, arg0: bool) -> None: ...
        def __copy__(self) -> Backend.Options: ...
        def __deepcopy__(self, memo: dict[int, Any]) -> Backend.Options: ...

    @overload
    def __init__(self, store: Store, rank: int, size: int, options: Backend.Options) -> None: ...
    @overload
    def __init__(self, communicator: Communicator, options: Backend.Options) -> None: ...
    @property
    def options(self) -> Backend.Options: ...
    def communicator(self, device: torch.device) -> Communicator:
        """The communicator that tensors of the device go through; made where there is none."""

    @property
    def mem_allocator(self) -> Any:
        """NCCL's allocator, for ``torch.cuda.MemPool(backend.mem_allocator)``.

        Raises:
            NotImplementedError: torch is built for CPUs only.
            RuntimeError: the library has none, or another one allocates in this process.
        """

    def register_mem_pool(self, pool: torch.cuda.MemPool, symm: bool = False) -> None:
        """Registers the memory that a pool has now, so that NCCL uses it without copying.

        What is registered already stays so; call it again for what the pool took later. Memory of
        `mem_allocator` is deregistered when it is freed, that of other allocators only by
        `deregister_mem_pool`. Connects the ranks for the pool's device, if they are not yet.

        Args:
            pool: its segments are registered, each with the group's communicator of its device.
            symm: they lie alike on all ranks (windows of NCCL 2.27.3 or later); collective.
        """

    def deregister_mem_pool(self, pool: torch.cuda.MemPool) -> None:
        """Undoes `register_mem_pool`; so does the end of the group.

        Raises:
            ValueError: the pool is not registered with this group.
        """

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Tells whether `allocate_tensor` is of use: NCCL has an allocator, the GPU multicasts."""

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A tensor of one dimension, not initialized, of registered memory of NCCL's."""

    def suspend(self) -> None:
        """Gives back NCCL's own memory on the group's GPUs, once what is in flight has ended.

        All ranks call it. Operations on GPUs raise RuntimeError until `resume`; those that a graph
        replays are not looked after, and must not run.

        Raises:
            NotImplementedError: the library is older than NCCL 2.29.7.
        """

    def resume(self) -> None:
        """Takes the memory again that `suspend` has given back. All ranks call it."""

    def memory_stats(self) -> dict[str, int]:
        """NCCL's own memory on the group's GPUs, in bytes.

        ``suspend`` is what `suspend` gives back, ``persist`` what it does not, ``total`` both;
        ``suspended`` counts the GPUs on which it is given back.
        """

    def get_error(self) -> ErrorType:
        """The kind of the group's failure, if any: a timeout, here, or on another rank."""

    def _comm_ptr(self) -> int:
        """Same as `comm_ptr`, which torch's own backend has from torch 2.15 on."""

    @property
    def comm_ptr(self) -> int:
        """NCCL's communicator of the accelerator, for code that calls NCCL itself.

        Where the group has several devices, that of the current one. Raises RuntimeError where
        there is none yet. It is the group's: valid until the group is destroyed.
        """

    @property
    def uid(self) -> int:
        """Counts the groups of this process."""

    def _is_initialized(self) -> bool: ...
    def _set_default_timeout(self, timeout: timedelta) -> None: ...
    def _enable_collectives_timing(self) -> None:
        """Makes works know their duration: ``work._get_duration()``."""

    def _set_enable_nan_check(self, enable_nan_check: bool) -> None:
        """Sets whether operations that would send NaN raise RuntimeError, with nothing sent."""

    def _group_start(self) -> None:
        """Collects what this thread issues from now on, to be launched together."""

    def _group_end(self) -> None:
        """Launches what was collected; the works of its asynchronous operations stand for all."""

    @staticmethod
    def get_build_nccl_version() -> tuple[int, int, int]:
        """The version of the header that torchcomms_pg was built with."""

    @staticmethod
    def get_runtime_nccl_version() -> tuple[int, int, int]:
        """The version of the loaded library; loads it. See `torchcomms_pg.nccl.version`."""
    NCCL_CTA_POLICY_DEFAULT: int
    NCCL_CTA_POLICY_EFFICIENCY: int
    NCCL_CTA_POLICY_ZERO: int
    def comm_split_count(self) -> int:
        """The number of groups that have been split from this one."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Called by ``new_group`` on ranks outside the new group; members need nothing of it."""
