"""Programs written for the torchcomms package, and as its documents have it, run."""

import datetime
import io
import json
import os
import pickle
import warnings

import expecttest
import pytest
import torch
import torch.distributed as dist

from harness.comms import each_backend, make, torchcomms
from harness.ranks import wait_for
from harness.values import assert_same

pytestmark = [pytest.mark.beyond_gloo, pytest.mark.torch_version]


def alone(*args, **options):
    """A communicator of this process."""
    options = {"store": dist.HashStore(), "rank": 0, "size": 1, **options}
    return torchcomms().new_comm("shm", "cpu", *args, **options)


# ---------------------------------------------------------------- hints and options


def test_an_unknown_hint_is_one_warning_and_has_no_effect(monkeypatch):
    monkeypatch.setattr("torchcomms_pg.options._ignored", set())
    hints = {"torchcomm::ncclx::high_priority_stream": "true", "backend_option": "value"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comm = alone(hints=hints)
        tensor = torch.ones(2)
        comm.all_reduce(tensor, torchcomms().ReduceOp.SUM, False, hints={"backend_option": "1"})
        comm.send(tensor, 0, True, hints={"torchcomm::shm::tga": "4"})
        comm.recv(tensor, 0, True, hints=dict(hints, **{"torchcomm::shm::tga": "4"})).wait()
        window = comm.new_window(torch.zeros(2))
        window.put(tensor, 0, 0, False, hints={"backend_option": "2"})
        window.tensor_deregister()
        batch = comm.batch_op_create()
        batch.send(tensor, 0)
        batch.recv(torch.ones(2), 0)
        batch.issue(False, hints={"backend_option": "3"})
    told = [str(warning.message) for warning in caught]
    assert len(told) == 2, told
    assert told[0].startswith("new_comm: hint 'backend_option' has no effect here")
    assert told[1].startswith("send: hint 'torchcomm::shm::tga' has no effect here; did you mean")
    assert all(len(text) < 200 for text in told)
    assert comm.get_options().hints == hints
    comm.finalize()


def test_options_may_come_third():
    timeout = datetime.timedelta(seconds=7)
    options = torchcomms().CommOptions(timeout=timeout)
    comm = alone(options)
    assert comm.get_options().timeout == timeout
    comm.finalize()
    with pytest.raises(TypeError, match="options are given twice"):
        alone(options, options=options)
    with pytest.raises(TypeError, match=r"new_comm: options is \{\}, wanted a CommOptions or None"):
        alone(options={})


def test_errors_and_warnings_in_full(monkeypatch):
    """As a user reads them; EXPECTTEST_ACCEPT=1 writes down what they are now."""
    monkeypatch.setattr("torchcomms_pg.options._ignored", set())
    package, told = torchcomms(), []
    for call in (
        lambda: alone(3),
        lambda: alone(hints={"torchcomm::shm::timing": "maybe"}),
        lambda: alone(hints={3: "true"}),
        lambda: alone(hints={"torchcomm::shm::timeing": "true", "backend_option": "x"}).finalize(),
        lambda: package.ReduceOp("SUM"),
        lambda: package.ReduceOp.PREMUL_SUM(torch.ones(2)),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                call()
            except (TypeError, ValueError) as error:
                told.append(f"{type(error).__name__}: {error}")
        told += [f"{warning.category.__name__}: {warning.message}" for warning in caught]
    expecttest.assert_expected_inline(
        "\n".join(told),
        """\
TypeError: new_comm: name is 3, wanted a str or None
ValueError: new_comm: hint torchcomm::shm::timing is 'maybe', wanted 'true' or 'false'
TypeError: new_comm: hints is {3: 'true'}, wanted a dict of strings or None
UserWarning: new_comm: hint 'torchcomm::shm::timeing' has no effect here; did you mean \
'torchcomm::shm::timing'?
UserWarning: new_comm: hint 'backend_option' has no effect here; docs/api.md lists those that have \
one
TypeError: ReduceOp: type is 'SUM', wanted a RedOpType such as RedOpType.SUM
ValueError: ReduceOp.PREMUL_SUM: factor has 2 elements, wanted 1\
""",
    )


# ---------------------------------------------------------------- hooks


class CountsCalls:
    """A hook that is an object, of three arguments with defaults beyond that."""

    def __init__(self):
        self.calls = []

    def __call__(self, name, op_id, args, more=None):
        self.calls.append((name, op_id, args))


@pytest.mark.parametrize("async_op", [False, True])
def test_hooks_get_name_and_id_in_front_if_they_take_them(async_op):
    package, comm = torchcomms(), alone()
    pre, calls, posts = CountsCalls(), [], []
    comm.register_pre_hook(pre)
    comm.register_pre_hook(callback=lambda *args: calls.append(args))
    comm.register_pre_hook(calls.append)  # does not tell what it takes
    comm.register_post_hook(lambda op_id, args: posts.append((op_id, args)))
    comm.register_post_hook(callback=posts.append)
    comm.all_reduce(torch.ones(2), package.ReduceOp.SUM, async_op).wait()
    assert wait_for(lambda: len(posts) == 2)
    ((name, op_id, args),) = pre.calls
    assert name == args.name == package.hooks.OpName.all_reduce
    assert calls == [(args,), args] and args.op_id == op_id
    assert [posts[0][0], posts[0][1].op_id, posts[1].op_id] == [op_id] * 3
    comm.finalize()


# ---------------------------------------------------------------- reductions


@pytest.mark.ranks(2)
def test_a_reduction_is_made_of_its_type(world):
    package = torchcomms()
    kinds, op = package.RedOpType, package.ReduceOp
    assert [kind.name for kind in kinds] == [
        "SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM", "AVG"
    ]  # fmt: skip
    assert op.SUM.type is kinds.SUM and op.PREMUL_SUM(2.0).type is kinds.PREMUL_SUM
    comm = make("types")
    for made in (op(kinds.MAX), op(kinds.PREMUL_SUM, 0.5)):
        tensor = torch.full((2,), float(comm.get_rank() + 1))
        comm.all_reduce(tensor, made, False)
        assert_same(tensor, torch.full((2,), 2.0 if made.factor is None else 1.5))
    for error, arguments, says in (
        (TypeError, ("SUM",), "type is 'SUM', wanted a RedOpType"),
        (TypeError, (kinds.SUM, 2.0), "SUM takes no factor, got 2.0"),
        (TypeError, (kinds.PREMUL_SUM,), "factor is None"),
    ):
        with pytest.raises(error, match=says):
            op(*arguments)
    comm.finalize()


# ---------------------------------------------------------------- objects


class Mine:
    """An object of a class of the caller's."""

    def __eq__(self, other):
        return isinstance(other, Mine)


def run_by_unpickling():
    os.environ["UNPICKLED"] = "1"


class Evil:
    """Unpickling it runs a function."""

    def __reduce__(self):
        return run_by_unpickling, ()


@each_backend
@pytest.mark.ranks(2)
def test_objects_of_other_classes_are_taken_where_the_caller_says_so(world, backend):
    comm, rank = make("trusting", backend), dist.get_rank()
    refused = pytest.raises(
        pickle.UnpicklingError, match=r"rank \d sent \S*\.(Mine|run_by_unpickling)\b"
    )
    for trusted in (True, False):
        for mine in (Mine(), Evil())[: 1 if trusted else 2]:
            options = {"weights_only": not trusted}
            one, all_ = [None], [None] * world
            calls = [
                (all_, lambda: comm.all_gather_object(all_, mine, **options)),
                (all_ if rank == 0 else None,
                 lambda: comm.gather_object(mine, 0, all_ if rank == 0 else None, **options)),
                (one if rank == 1 else None,
                 lambda: comm.broadcast_object_list(
                     one if rank == 1 else [mine], 0, **options)),
                (one, lambda: comm.scatter_object_list(
                    0, one, [mine] * world if rank == 0 else None, **options)),
                (one if rank == 1 else None,
                 lambda: comm.recv_object_list(one, 0, **options) if rank == 1
                 else comm.send_object_list([mine], 1)),
            ]  # fmt: skip
            for filled, call in calls:
                one[:], all_[:] = [None], [None] * world
                if filled is None or trusted:
                    call()
                    assert filled is None or filled == [mine] * len(filled)
                else:
                    with refused:
                        call()
                    assert filled == [None] * len(filled)
    assert "UNPICKLED" not in os.environ
    comm.barrier(False)
    comm.finalize()


@pytest.mark.ranks(2)
def test_tensors_numbers_strings_and_containers_are_taken_from_anybody(world):
    comm, got = make("plain"), [None] * world
    plain = {"a": [1, 2.5, None, True, "x", b"y"], "b": (torch.float32, {3}), "c": 1j}
    comm.all_gather_object(got, plain)
    assert got == [plain] * world
    states = torch.nn.Linear(2, 2).state_dict()
    comm.all_gather_object(got, states)
    assert got[0].keys() == states.keys() and got[1]["weight"].shape == (2, 2)
    with torch.serialization.safe_globals([datetime.timedelta]):
        comm.all_gather_object(got, datetime.timedelta(1))
    assert got == [datetime.timedelta(1)] * world
    with pytest.raises((pickle.PicklingError, AttributeError)):
        torch.save(lambda: None, io.BytesIO())  # what cannot be sent is refused before it is
    comm.finalize()


# ---------------------------------------------------------------- split


@each_backend
@pytest.mark.ranks(3)
def test_a_wrong_split_raises_on_all_ranks_that_it_concerns(world, backend):
    comm, rank = make("splitting", backend), dist.get_rank()

    def told(mine, *says):
        """`says`: for each rank what its error says, None: it has none."""
        if says[rank] is None:
            child = comm.split(mine[rank])
            assert (child is None) == (not mine[rank])
            return child and child.finalize()
        with pytest.raises(ValueError, match=says[rank]) as raised:
            comm.split(mine[rank])
        assert isinstance(raised.value, RuntimeError)  # what the torchcomms package raises

    twice = r"split: ranks \[0, 0, 1\] name 0 twice"
    one = "only 1 have passed this list; pass the same on all ranks of a group"
    two = "only 2 have passed this list"
    told([[0, 0, 1], [0, 0, 1], []], twice, twice, None)
    told([[0, 0, 1], [0, 1], [2]], twice, one, None)
    told([[0, 1], [0, 1, 2], [2]], one, one, None)
    told([[0, 1, 2], [0, 2, 1], [0, 1, 2]], two, one, two)
    told([[1], [1], [2, 7]], "do not include this rank, 0", None, "name 7, wanted ranks of 0 to 2")
    tensor = torch.ones(1)
    comm.all_reduce(tensor, torchcomms().ReduceOp.SUM, False)  # as before
    assert_same(tensor, torch.full((1,), 3.0))
    comm.finalize()


MISTAKES = {
    "split of a list that has a rank twice": (
        RuntimeError, ValueError, lambda comm: comm.split([0, 0], name="twice")),
    "split of a list without the caller": (
        RuntimeError, ValueError, lambda comm: comm.split([1], name="excludes")),
    "a backend that does not exist": (
        ModuleNotFoundError, ValueError,
        lambda comm: torchcomms().new_comm("invalid", torch.device("cpu"), "mine")),
    "NaN": (RuntimeError, RuntimeError, lambda comm: comm.all_reduce(
        torch.tensor([float("nan")]), torchcomms().ReduceOp.SUM, False)),
    "an operation after finalize": (
        RuntimeError, RuntimeError, lambda comm: (comm.finalize(), comm.barrier(False))),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_callers_mistake_raises_what_programs_for_that_package_catch(mistake):
    there, here, call = MISTAKES[mistake]
    comm = alone()
    torchcomms().hooks.NanCheckHook().register_with_comm(comm)
    with pytest.raises(there) as raised:
        call(comm)
    assert isinstance(raised.value, here)
    comm.finalize()


# ---------------------------------------------------------------- what its newest release has


def test_new_comm_takes_its_arguments_in_the_places_that_they_have_there():
    limit, store = datetime.timedelta(seconds=7), dist.HashStore()
    comm = torchcomms().new_comm(
        "shm", torch.device("cpu"), "placed", False, limit, True, store, rank=0, size=1
    )
    options = comm.get_options()
    assert (options.abort_process_on_timeout_or_error, options.timeout) == (False, limit)
    assert options.hints == {"torchcomm::nccl::high_priority_stream": "true"}
    assert comm.get_name() == "placed" and comm.is_abort_supported()
    comm.finalize()


def test_operations_are_synchronous_where_nothing_else_is_said():
    comm, tensor, ops = alone(), torch.ones(3), torchcomms().ReduceOp
    assert comm.all_reduce(tensor, ops.SUM).is_completed()
    assert comm.broadcast(tensor, 0).is_completed()
    assert comm.barrier().is_completed()
    window = comm.new_window(torch.zeros(3))
    window.put(tensor, 0, 0)
    window.signal(0)
    window.wait_signal(0)
    assert_same(window.get_tensor(), tensor)
    assert window.get_attr(0) == torchcomms().TorchCommWindowAttr()
    comm.finalize()


def recorded(hook):
    return [entry["profiling_name"] for entry in json.loads(hook.dump_json()).get("entries", [])]


def test_a_recorder_follows_the_communicators_that_are_split_from_its_own():
    from torchcomms_pg.hooks import FlightRecorderHook, process_recorder

    parent, tensor, ops = alone("recorded"), torch.ones(3), torchcomms().ReduceOp
    hook, apart = FlightRecorderHook(), FlightRecorderHook(isolated=True)
    apart.register_with_comm(parent)
    before = process_recorder().size() if process_recorder() else 0
    parent.all_reduce(tensor, ops.SUM)
    assert (process_recorder().size() if process_recorder() else 0) == before
    hook.register_with_comm(parent)
    child = parent.split([0], "child")
    grandchild = child.split([0], "grandchild")
    grandchild.broadcast(tensor, 0)
    for each in (hook, apart):
        assert recorded(each)[-1].endswith(":broadcast"), recorded(each)
    assert process_recorder().size() > before
    hook.unregister()
    sizes = hook.size(), apart.size()
    parent.split([0], "another").finalize()
    child.barrier()
    assert hook.size() == sizes[0] and apart.size() > sizes[1]
    for comm in (grandchild, child, parent):
        comm.finalize()
