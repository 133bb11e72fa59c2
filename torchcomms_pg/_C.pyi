from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import CodeType
from typing import Any, ClassVar, overload

import torch
from torch._C._distributed_c10d import Backend as _C10dBackend
from torch._C._distributed_c10d import ErrorType, ProcessGroup, Store
from torch._C._distributed_c10d import ReduceOp as _ReduceOp
from torch._C._distributed_c10d import Work as _Work
from torch.utils._python_dispatch import TorchDispatchMode

from torchcomms_pg.work import TorchWork

# The minor of torch that the extension was compiled for, such as "2.15".
torch_version: str
# NCCL_VERSION_CODE of the nccl.h that the extension was compiled with.
nccl_header_version: int
# Whether c10d calls hooks for the operations of every group, as it does from torch 2.14 on.
groups_have_hooks: bool
# Names of NcclConfig's attributes, by the attribute's name and by the name of NCCL's field.
nccl_config_names: dict[str, str]

def set_comm_error(type: type[Exception]) -> None:
    """Sets the class of the exceptions that report failures of communication."""

def set_python_stack_source(
    describe: Callable[[list[list[tuple[str, int, str]]]], tuple[str, list[str], dict[int, str]]],
) -> None:
    """Sets the function that returns the places of this process's Python threads and of stacks."""

def set_parting_source(answer: Callable[[str, str, int, int, list[str]], str]) -> None:
    """Sets the function that answers where two ranks have parted."""

def recent_operations(
    group: str, rank: int
) -> list[tuple[int, str, int, list[tuple[CodeType, int]], int]]:
    """Returns a group's latest collectives: number, name, thread, Python's stack and time of issue.

    The innermost frame comes first. The time is in nanoseconds since the epoch. ``rank``: this
    process's global rank.
    """

def set_waiting_functions(functions: Sequence[Callable[..., object]]) -> None:
    """Sets the functions that wait for the operations that they issue asynchronously. Once only."""

class _RankLateness:
    @property
    def later(self) -> float: ...
    @property
    def share(self) -> float: ...

class _Lateness:
    """A judgement of all ranks; for its values see `RankLateness` in late_ranks.py."""

    @property
    def ranks(self) -> list[_RankLateness]: ...
    @property
    def collectives(self) -> int: ...
    @property
    def seconds(self) -> float:
        """Time that the judged collectives span."""

    @property
    def late(self) -> int | None: ...

def set_late_warning(on: bool) -> None:
    """Sets whether rank 0 of a group judges the ranks' lateness and warns of a late rank."""

def observe_waits(works: type) -> None:
    """Has the watch see which thread waits in ``wait()`` of the class of Works; has effect once."""

class Watch:
    """A handle of the watch over one process group; has no effect once the group has ended."""

    def set_timeout(self, timeout: timedelta) -> None: ...
    def lateness(self, operation: str) -> _Lateness:
        """Returns a judgement of the arrivals that the ranks have published.

        `operation`: the name that errors give. Raises RuntimeError if the group has ended.
        """

    def close(self) -> None:
        """Ends the watch, since the group is being destroyed. Idempotent."""

def watch(
    *, group: ProcessGroup, ranks: Sequence[int], devices: Sequence[str], timeout: timedelta
) -> Watch:
    """Watches the group's operations on these types of devices. `ranks`: global ranks."""

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
        """Sum of the operations' sizes: of input or output, whichever is larger."""
    @property
    def seconds(self) -> float:
        """Sum of the times from issue to end; a lower limit if the ends are found by polling."""
    @property
    def waited(self) -> float:
        """Seconds for which threads of the program were blocked in the operations."""

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
        """Whether at least one of these groups has not ended."""
    @property
    def in_flight(self) -> int: ...
    @property
    def oldest(self) -> float:
        """Seconds since the issue of the oldest operation in flight; 0 if none is in flight."""
    @property
    def failures(self) -> int:
        """Number of failures of these groups; of verdicts if they are watched."""
    @property
    def lateness(self) -> list[_RankLateness]:
        """The last judgement of this process, by rank; empty if it has not judged."""
    @property
    def operations(self) -> list[OperationTotals]: ...

class ProcessTotals:
    """What all groups have done in this process."""

    @property
    def rank(self) -> int:
        """This process's global rank in its first group; -1 before the first group."""
    @property
    def groups(self) -> list[GroupTotals]: ...

def process_totals() -> ProcessTotals: ...
def await_failure(written: int, patience: timedelta) -> int | None:
    """Waits until more than `written` failures have happened, but no longer than `patience`.

    Returns the number of failures, or None after `end_metrics_writer`.
    """

def end_metrics_writer() -> None:
    """Ends the present call and all later calls of `await_failure`."""

def thread_stacks() -> dict[int, list[tuple[CodeType, int, int]]]:
    """Returns each thread's frames by its ident, the innermost first: code, `f_lasti` and line."""

def variables_of(thread: int, level: int, code: CodeType) -> dict[str, object] | None:
    """Returns the global and local variables of a thread's frame, the outermost of which is 0.

    None if the thread has no such frame, or one of another code.
    """

def current_exceptions() -> dict[int, object]:
    """Does what `sys._current_exceptions` does, which can hang a process on Python 3.11."""

def compile_began(trigger: str) -> None:
    """Records that this process compiles, until `compile_ended`. Calls may nest."""

def compile_ended() -> None: ...
def watch_over_monitor(patience: timedelta, ends_process: bool) -> None:
    """Reports on stderr if the monitor's thread is stuck, or the GIL held, for `patience`.

    A `patience` of 0 turns this off. `ends_process`: a stuck monitor then ends the process.
    """

def set_status(
    folder: str, gateway: Sequence[str], environment: Sequence[str | bytes], run: str
) -> None:
    """Sets the folder of the status's sockets, the gateway for RAS and the run's name.

    Each may be empty: then there is no status, no gateway, no name. `gateway`: the command that
    starts it, whose last word is its address; `environment`: of the command, as NAME=VALUE.
    """

def set_last_words(on: bool) -> None:
    """Sets whether SIGTERM and SIGABRT first have this process say what it waits for."""

def begin_wait(
    *,
    text: str,
    ranks: Sequence[int],
    meets: bool,
    called_at: str,
    verdict_after: timedelta,
    meeting: tuple[str, int, str] | None = None,
    rank: int = -1,
) -> int:
    """Records that a thread begins a wait that is no operation; returns its number.

    `text` is equal on all ranks that meet. `ranks`: those that are waited for, by their global
    numbers. `meets`: each of them has to come to the same wait. `verdict_after`: 0 for never.
    `meeting`: host and port of the store's server, and a key, by which the ranks find out who has
    come, if this process has no group with them yet; `rank`: this process's rank then.
    """

class StoreBoard:
    """A store's keys, over the process's one connection. Raises RuntimeError without a server."""

    def __init__(self, store: Store) -> None: ...
    def get(self, key: str) -> str | None:
        """Returns the key's value, or None if the key does not exist. Does not wait for it."""

    def claim(self, key: str, value: str) -> str:
        """Sets the key if it does not exist; returns the value that it then has."""

    def add(self, key: str, value: int) -> int:
        """Adds to the key's number, and returns the sum."""

    def erase(self, key: str) -> None:
        """Removes the key."""

def store_place(store: Store) -> tuple[str, int, str] | None:
    """Returns host and port of the store's server, and the keys' prefix; None without a server."""

def end_wait(number: int, joined: bool = False) -> None:
    """Records that the wait has ended. `joined`: this rank has met the others."""

def set_error_file(path: str) -> None:
    """Sets the file into which a failure is written for torchrun; "" for none."""

def leave_word(how: str, names: Sequence[str], fails: bool) -> None:
    """Leaves word for the other ranks of the groups `names` that this rank is about to end them.

    `how`: "destroyed the group at ...". A rank that then fails in a group says it. `fails`: this
    rank ends them because of an error, so its recorder is dumped.
    """

def end_with_error(how: str) -> None:
    """Leaves word in all groups that an exception ends this program, and dumps the recorder.

    `how`: "ended with ValueError: ...". A group in which an operation has failed gets no word: a
    group of another backend first says why, as far as other ranks are the reason.
    """

def set_verdict_after(time: timedelta) -> None:
    """Sets when groups made from now on print a verdict that ends nothing; 0 for never."""

def set_compile_limit(limit: timedelta) -> None:
    """Sets how long beyond its deadline an operation waits for ranks that compile."""

def set_work_type(type: type[TorchWork]) -> None:
    """Sets the class in which hooks get the Work of an operation."""

def work_state(work: _Work) -> str:
    """Returns the name of the work's `WorkStatus`."""

def work_error(work: _Work) -> BaseException | None:
    """Returns the error of the work; None while it runs, or if it succeeded."""

def work_wait_blocking(work: _Work, timeout: timedelta | None) -> None:
    """Does the same as ``work.wait``, but the calling thread waits even on an accelerator."""

def refuse_nan(args: PreHookArgs, rank: int) -> None:
    """Raises RuntimeError, with the operation and the tensor, if this `rank` would send NaN."""

def log_info(text: str) -> None:
    """Writes a line to torch's log, which shows it if TORCH_CPP_LOG_LEVEL is INFO."""

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
    """Makes the recorder of this process on the first call; later calls change how it is dumped."""

def process_recorder() -> Recorder | None:
    """Returns the recorder of this process; None if it is off or has not been made."""

def set_message_batch(open: bool) -> bool:
    """Opens or ends the batch of this thread's messages, for recorders; returns if it was open."""

class Recorder:
    """The native object behind a `FlightRecorder`, which describes its methods."""

    def __init__(self, max_entries: int, cpp_stacks: bool) -> None: ...
    @property
    def enabled(self) -> bool: ...
    @property
    def size(self) -> int: ...
    @property
    def rank(self) -> int:
        """This process's global rank in the first recorded group; -1 before the first."""
    def reset(self) -> None: ...
    def json(self, completed: bool = True, collectives: bool = True) -> str: ...
    def write(
        self, path: str, completed: bool = True, collectives: bool = True, stacks: bool = True
    ) -> None:
        """Writes the pickle to a file. Raises RuntimeError if the file cannot be written."""

def keep_store(store: Store) -> None:
    """Keeps the store, and the server in it, until the process ends."""

def new_host_communicator(
    store: Store,
    rank: int,
    size: int,
    name: str,
    timeout: timedelta,
    ends_process: bool,
    gloo: bool,
) -> Communicator:
    """Makes a communicator for CPU tensors, over shared memory or the connections of torch's Gloo.

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
    """Makes a communicator for tensors of the device. Collective over its ranks.

    `nccl_library` is the path of libnccl, `nccl_folder` the folder of the installed NCCL package;
    both may be empty. `named`: NCCL gets the name, if its version takes names.
    """

def use_host_streams(device_type: str, library: str) -> None:
    """Makes shared memory, or the library at the path, carry a simulated accelerator's tensors.

    `library`: the path; empty for shared memory.
    """

def load_nccl(path: str, folder: str) -> NcclLibrary:
    """Loads libnccl as `torchcomms_pg.nccl.load` does, and returns it. Both texts may be empty."""

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
    """Returns the unique ids of a new communicator, which its ranks exchange through the store.

    Raises if the ranks have loaded different versions of NCCL.
    """

class NcclConfig:
    """Settings of a communicator for NCCL: the fields of its ``ncclConfig_t``.

    Attributes have the names of torch's ``ProcessGroupNCCL.NCCLConfig``; NCCL's documentation
    says what they mean, and None is NCCL's default. NCCL's environment variables take precedence.
    A value that NCCL does not take raises ValueError. A field that is newer than the loaded
    library raises RuntimeError when a communicator is made.

    Attributes:
        blocking: 0 or 1, and ignored: NCCL's calls block, in threads that a deadline can leave.
        net_name: name of the network plugin.
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
        """The version in NCCL's form, e.g. 23007 for 2.30.7."""

    @property
    def origin(self) -> str:
        """The way in which the library was found, in words."""

    @property
    def missing(self) -> list[str]:
        """Names of the optional functions of NCCL that the library lacks."""

class OpName:
    """The operation that a hook is called for."""

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
    def name(self) -> str:
        """The operation's name."""

    @property
    def value(self) -> int:
        """The operation's number."""

class PreHookArgs:
    """An operation that is about to be launched.

    Attributes:
        name: the operation.
        op_id: number of the operation among the hooked operations of this process, from 1.
        async_op: as the caller passed it.
        inputs: the tensors that the operation reads.
        outputs: the tensors that the operation writes.
        input: the only tensor of `inputs`, or the list if it has not exactly one.
        output: the same for `outputs`.
        tensors: all tensors of `inputs` and `outputs`, each once.
        tensor: the only tensor of `tensors`; None if there is not exactly one.
        root: root of a rooted collective; None for others.
        peer: the other rank of a message, put or signal; -1 for a receive from any rank; None for
            other operations.
        reduce_op: such as ``"SUM"``; None if nothing is reduced.
        input_split_sizes: rows for each rank, of all_to_all_v_single; empty for others.
        output_split_sizes: rows from each rank, of all_to_all_v_single; empty for others.
        ops: members of a batch, which have the batch's op_id; empty for others.
        num_ops: number of `ops`.
        ranks: ranks of the communicator that a split or shrink makes, by their numbers in this
            communicator; empty for others, and if this rank is in no new communicator.
        new_name: name of the communicator that a split or shrink makes; empty for others.
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
    """An operation that is over for its caller.

    It has ended, was cancelled by a pre hook, or could not be launched.

    Attributes:
        name: the operation.
        op_id: as in `PreHookArgs`.
        work: the operation's work, which has ended. None for a synchronous operation that failed,
            for an operation that was not launched, and for finalize.
        error: the operation's error; None if it succeeded.
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
    """An operation that has ended.

    Attributes:
        name: the operation.
        op_id: as in `PreHookArgs`.
        async_op: as in `PreHookArgs`.
        status: ``"completed"`` or ``"failed"``.
        error: the operation's error; None if it completed.
        duration: milliseconds from the operation's start to its end; 0 if it was never started.
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
    """A registered hook; every ``register_..._hook`` returns one."""

    def remove(self) -> None:
        """Ends the calls of the hook, from the next operation on. Idempotent."""

class Communicator:
    """The native object behind a `TorchComm`, which describes the operations."""

    def register_pre_hook(self, hook: Callable[[PreHookArgs], object]) -> RemovableHandle: ...
    def register_post_hook(self, hook: Callable[[PostHookArgs], object]) -> RemovableHandle: ...
    def register_end_hook(self, hook: Callable[[EndHookArgs], object]) -> RemovableHandle: ...
    def register_abort_hook(self, hook: Callable[[], object]) -> RemovableHandle: ...
    def record(self, recorder: Recorder) -> bool:
        """Makes `recorder` record the operations, from the next one on.

        Returns False if it does so already, or has no room for an entry.
        """

    def stop_recording(self, recorder: Recorder) -> None:
        """Ends the recording by `recorder`. Idempotent."""

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
        """The version of NCCL's interface that the library has, e.g. ``"2.28.9"``."""

    @property
    def failed(self) -> bool: ...
    def lateness(self, operation: str) -> _Lateness:
        """Returns a judgement of the arrivals that the ranks have published.

        `operation`: the name that errors give.
        """

    @property
    def ends_process(self) -> bool:
        """Whether a failure ends the process."""

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
        """Returns the address of the library's communicator, once all ranks have joined."""

    def new_window(self) -> Window: ...
    def allocate_tensor(self, size: int, dtype: torch.dtype) -> torch.Tensor: ...
    def enter_batch(self) -> int | None:
        """Opens a batch in this thread, or joins the open batch.

        Returns the number of operations in the joined batch, or None if it opened one.
        """

    def leave_batch(self, joined: int | None) -> _Work | None:
        """Ends a scope that `enter_batch` has begun and for which it returned `joined`.

        Launches the batch if the scope opened it. Returns the batch's Work; None if it is empty.
        """

    def cancel_batch(self, joined: int | None) -> None:
        """Does the same as `leave_batch`, but drops the operations issued since `enter_batch`."""

    @property
    def in_batch(self) -> bool:
        """Whether the calling thread has a batch open."""

    def abort(self, why: str) -> None: ...
    def close(self) -> None: ...
    def relax(self, time: timedelta) -> int:
        """Makes peers that wait for this rank extend their deadlines to `time` from now.

        Returns the number by which `end_relaxation` ends the extension earlier.
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
    """The native object behind a `TorchCommWindow`, which describes the operations."""

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

def show_operators(
    mode: TorchDispatchMode, issued: Callable[..., object], roles: Mapping[str, dict[str, Any]]
) -> None:
    """Shows a mode the operators of torch that touch memory of flights, and functional collectives.

    They are the operators of the threads of `show_thread`. All other operators pass in C++.
    Asynchronous operators of c10d are issued on copies there.

    Args:
        issued: called with the name of an operation of c10d, the number of elements and the dtype
            of its tensors, the group's name and description, whether it is asynchronous, and
            whether it can be checked. Returns an object with `report` and `overlaps`, as
            `check_async.issues.Issue` has them.
        roles: of the arguments of c10d's operators, as `check_async.arguments.c10d_roles` returns
            them.
    """

def show_no_operators() -> None:
    """Ends `show_operators`."""

def show_thread(shown: bool) -> bool:
    """Sets whether the operators of the calling thread are shown; returns whether they were."""

def show_again(operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls an operator of c10d that the mode has been shown, so that it is checked."""

def poison(tensor: torch.Tensor) -> None:
    """Fills the tensor with NaN, or with a value that is unlikely for its type."""

class Span:
    """The bytes of one tensor, which keep no memory alive."""

    def __init__(self, tensor: torch.Tensor) -> None: ...
    def freed(self) -> bool:
        """Returns whether the memory has been freed, by the storage's end or by a resize."""

    def shares_bytes(self, other: Span) -> bool:
        """Returns whether the tensors have a byte in common."""

class Flight:
    """One operation whose end the program does not know yet. Keeps no tensor alive.

    Args:
        issue: has `report` and `overlaps`, as `check_async.issues.Issue` has them.
        outputs, inputs: the tensors that it writes, and those that it only reads.
        compiled: whether compiled code has issued it.

    Attributes:
        process: who has issued it.
        touched: whether an operator has written into its tensors.
    """

    process: int
    touched: bool

    def __init__(
        self,
        issue: object,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        compiled: bool,
    ) -> None: ...
    @property
    def issue(self) -> Any: ...
    @property
    def outputs(self) -> list[Span]: ...
    @property
    def inputs(self) -> list[Span]: ...

def any_flights() -> bool: ...
def flights() -> list[Flight]: ...
def sweep_flights() -> None:
    """Drops the flights whose tensors are gone, and reports lost results of compiled code."""

def forget_flights() -> None:
    """Drops all flights, also in a forked child."""

class Delivery:
    """Hands an operation's results over when the program learns of its end.

    Args:
        flight: of a functional collective; is in `flights()` from now on.
        inputs, copies: the program's tensors, and what was in them at the issue.
    """

    def __init__(
        self, flight: Flight, inputs: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]
    ) -> None: ...
    @property
    def flight(self) -> Flight: ...
    def ended(self, ok: bool) -> None:
        """Hands the results over, if the operation has ended well, and ends the flight."""

    def end_with(self, result: torch.Tensor) -> None:
        """Hands over the result of a functional collective, and ends the flight."""

    def future_taken(self) -> None:
        """Notes that Python has got a future, whose calls tell of the end."""

    def future_passed_on(self) -> None:
        """Notes that the future is in the hands of C++, which waits for it by itself."""

    def work_dropped(self) -> None:
        """Releases the inputs, as a work does that the program drops: futures keep no input."""

class LateWork(_Work):
    """The work of an operation on copies, whose results are handed over at its end."""

    @property
    def deliveries(self) -> list[Delivery]: ...

def late_method(
    name: str, writes: Sequence[bool], root_reads: bool | None, issued: Callable[..., object]
) -> Callable[..., Any]:
    """Returns a method for `Communicator` that issues asynchronous operations on copies.

    Args:
        name: of the method that it stands for and calls. Its arguments are given by position.
        writes: for each of its first arguments, which are tensors or nested lists of them, whether
            the operation writes it; otherwise it only reads it.
        root_reads: whether the root only reads the tensor (true), or the other ranks do (false).
            The root is the next argument. None if all ranks do the same.
        issued: as for `show_operators`.
    """

def open_late_batch(batch: object) -> None:
    """Opens a batch of an object in this thread, unless it has one."""

def close_late_batch(batch: object, work: _Work | None) -> _Work | None:
    """Returns a work that hands over the results of the object's batch when `work` ends."""

def cancel_late_batch(batch: object) -> None:
    """Ends the operations of the object's batch without results."""

class Work(_Work):
    """One issued operation. Its repr shows operation, sizes, group, rank, timeout and state."""

    def __copy__(self) -> Work: ...
    def __deepcopy__(self, memo: dict[int, Any]) -> Work: ...

class Backend(_C10dBackend):
    """The backend of one process group, as one rank holds it.

    ``dist.init_process_group("torchcomms")`` and ``dist.new_group`` make it. A program may also
    make one itself, and use it without a process group. Making it is collective over its ranks.

    Args:
        store: the store for the rendezvous.
        rank: of this process or thread, from 0.
        size: number of ranks.
        options: timeout and name of the group.
        communicator: an existing communicator, in place of the first three arguments; it stays
            usable when the group is shut down.

    Raises:
        CommError: not all ranks arrived within ``options._timeout``.

    Attributes:
        NCCL_CTA_POLICY_DEFAULT: a value of `NcclConfig.cta_policy`, as NCCL describes it.
        NCCL_CTA_POLICY_EFFICIENCY: another one.
        NCCL_CTA_POLICY_ZERO: another one.
    """

    class Options(_C10dBackend.Options):
        """Options that ``pg_options`` of ``init_process_group`` takes for this backend.

        Args:
            timeout: how long an operation may take, from its issue, before the group fails.
            name: the backend's name in profiles and in `Backend.name`; ``gloo`` for a group that
                replaces a group of Gloo.

        Attributes:
            nccl_library: path of the libnccl.so.2 to load. If it is empty, `torchcomms_pg.nccl`
                chooses, see its `load`.
            nccl_folder: folder of the installed NCCL package; set by `create_backend`.
            is_high_priority_stream: whether asynchronous operations of an accelerator run in a
                stream of high priority.
            config: NCCL's settings for a communicator. Groups that are split from this one
                inherit them, unless they get options.
            ranks_per_root: number of ranks that NCCL starts from one unique id; set by
                `create_backend`.
            blocking_wait: whether ``work.wait()`` blocks the host even on an accelerator; set by
                `create_backend`.
            nan_check: whether operations that would send NaN raise; set by `create_backend`.
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
            """True if a failure ends the process, after the abort hooks; False if it raises.

            None takes the value of TORCHCOMM_ABORT_ON_ERROR. If that is not set, either, a failure
            on CPU tensors raises CommError, and `accelerator_ends_process` decides for others.
            """

        @abort_process_on_timeout_or_error.setter
        def abort_process_on_timeout_or_error(self, arg0: bool | None) -> None: ...
        @property
        def accelerator_ends_process(self) -> bool:
            """Result of `torchcomms_pg.env.accelerator_ends_process`; set by `create_backend`."""

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
        """Returns the communicator for tensors of the device, and makes it if none exists."""

    @property
    def mem_allocator(self) -> Any:
        """NCCL's allocator, for ``torch.cuda.MemPool(backend.mem_allocator)``.

        Raises:
            NotImplementedError: torch is built for CPUs only.
            RuntimeError: libnccl is not found or has no allocator, or another library already
                allocates in this process.
        """

    def register_mem_pool(self, pool: torch.cuda.MemPool, symm: bool = False) -> None:
        """Registers the memory that a pool has now, so that NCCL uses it without copying.

        Call it again for memory that the pool takes later; registered memory stays registered.
        Memory of `mem_allocator` is deregistered when it is freed, memory of other allocators only
        by `deregister_mem_pool`. Makes the group's communicator for the device if none exists.

        Args:
            pool: its segments are registered, each with the group's communicator of its device.
            symm: whether the segments have the same layout on all ranks (windows of NCCL 2.27.3 or
                later). The call is then collective.
        """

    def deregister_mem_pool(self, pool: torch.cuda.MemPool) -> None:
        """Ends the registration of a pool, as the end of the group does, too.

        Raises:
            ValueError: the pool is not registered with this group.
        """

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Returns whether NCCL has an allocator and the GPU supports multicast.

        `allocate_tensor` is of use only then.
        """

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Returns an uninitialized tensor of one dimension in registered memory of NCCL."""

    def suspend(self) -> None:
        """Waits for the operations in flight, then frees NCCL's own memory on the group's GPUs.

        All ranks call it. Operations on GPUs raise RuntimeError until `resume`. The program must
        not replay graphs that contain operations of the group: this is not checked.

        Raises:
            NotImplementedError: the library is older than NCCL 2.29.7.
        """

    def resume(self) -> None:
        """Allocates again the memory that `suspend` has freed. All ranks call it."""

    def memory_stats(self) -> dict[str, int]:
        """Returns the bytes of NCCL's own memory on the group's GPUs.

        ``suspend`` is the memory that `suspend` frees, ``persist`` the memory that it keeps,
        ``total`` both. ``suspended`` is the number of GPUs that are suspended.
        """

    def get_error(self) -> ErrorType:
        """Returns the kind of the group's failure, or SUCCESS if it has not failed."""

    def _comm_ptr(self) -> int:
        """Returns the same as `comm_ptr`, which torch's own backend has from torch 2.15 on."""

    @property
    def comm_ptr(self) -> int:
        """The address of NCCL's communicator, for code that calls NCCL itself.

        If the group has several devices, the communicator is the one of the current device. Raises
        RuntimeError if none exists yet. The group owns it: valid until the group is destroyed.
        """

    @property
    def uid(self) -> int:
        """The number of the group among the groups of this process, from 0."""

    def _is_initialized(self) -> bool: ...
    def _set_default_timeout(self, timeout: timedelta) -> None: ...
    def _enable_collectives_timing(self) -> None:
        """Makes works measure their duration, for ``work._get_duration()``."""

    def _set_enable_nan_check(self, enable_nan_check: bool) -> None:
        """Sets whether operations that would send NaN raise RuntimeError and send nothing."""

    def _group_start(self) -> None:
        """Collects the operations that this thread issues, until `_group_end` launches them."""

    def _group_end(self) -> None:
        """Launches the collected operations as one; each one's work stands for all of them."""

    @staticmethod
    def get_build_nccl_version() -> tuple[int, int, int]:
        """Returns the version of the nccl.h that torchcomms_pg was built with."""

    @staticmethod
    def get_runtime_nccl_version() -> tuple[int, int, int]:
        """Loads libnccl and returns its version, see `torchcomms_pg.nccl.version`."""
    NCCL_CTA_POLICY_DEFAULT: int
    NCCL_CTA_POLICY_EFFICIENCY: int
    NCCL_CTA_POLICY_ZERO: int
    def comm_split_count(self) -> int:
        """Returns the number of groups that have been split from this one."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Does nothing. ``new_group`` calls it on ranks outside the new group."""
