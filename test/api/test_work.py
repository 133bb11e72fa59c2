"""The Work that an asynchronous operation returns keeps torch's contract."""

import datetime
import gc
import re
import threading
import time

import pytest
import torch
import torch.distributed as dist

from harness import catalogue
from harness.ranks import BACKEND, time_limit, wait_for, woken
from harness.values import all_data, assert_reduced, assert_same, data

pytestmark = pytest.mark.torch_version

beyond_gloo = pytest.mark.beyond_gloo
CPU = torch.device("cpu")
SOON = datetime.timedelta(seconds=0.3)


def exception_of(work):
    """work.exception(), or what wait() raises where torch (before 2.13) cannot convert it."""
    try:
        return work.exception()
    except TypeError:
        try:
            work.wait()
        except RuntimeError as error:
            return error
    return None


def late_pair(store, first, late):
    """Rank 0 runs first(work) while the all_reduce cannot finish; then rank 1 comes."""
    if dist.get_rank() == 0:
        tensor = torch.ones(1000)
        work = dist.all_reduce(tensor, async_op=True)
        try:
            first(work)
        finally:
            store.set("go", "1")
        late(work, tensor)
    else:
        store.wait(["go"])
        dist.all_reduce(torch.ones(1000))


@pytest.mark.ranks(2)
def test_a_work_is_not_completed_before_the_peer_arrives_and_is_afterwards(store):
    def pending(work):
        assert not work.is_completed()
        assert not work.get_future().done()

    def finished(work, tensor):
        work.wait()
        assert work.is_completed() and exception_of(work) is None
        assert_same(tensor, torch.full((1000,), 2.0))

    late_pair(store, pending, finished)


@pytest.mark.ranks(2)
def test_a_work_completes_without_anybody_waiting(store):
    def finished(work, tensor):
        assert wait_for(work.is_completed, 20), "is_completed() stays False without wait()"
        assert_same(tensor, torch.full((1000,), 2.0))

    late_pair(store, lambda work: None, finished)


@pytest.mark.ranks(2)
def test_future_callbacks_run_after_the_result_is_there(store):
    seen = []

    def chain(work):
        future = work.get_future()
        seen.append(future.then(lambda f: f.value()[0] * 10))
        seen.append(seen[0].then(lambda f: f.value() + 1))
        assert not seen[1].done()

    def finished(work, tensor):
        assert_same(seen[1].wait(), torch.full((1000,), 21.0))
        assert_same(work.get_future().value()[0], torch.full((1000,), 2.0))

    late_pair(store, chain, finished)


@pytest.mark.ranks(2)
def test_wait_releases_the_gil(store):
    """While the main thread waits, another thread runs Python and lets the peer go on."""
    if dist.get_rank() == 0:
        thread = threading.Thread(target=lambda: (sum(range(1000)), store.set("go", "1")))
        work = dist.all_reduce(torch.ones(10), async_op=True)
        thread.start()
        work.wait()
        thread.join()
    else:
        store.wait(["go"])
        dist.all_reduce(torch.ones(10))


@beyond_gloo
@pytest.mark.ranks((1, 2, 3, 4))
def test_a_small_operation_that_is_waited_for_at_once_wakes_no_thread(world):
    tensor = torch.ones(1000)
    dist.all_reduce(tensor, async_op=True).wait()
    series = []
    for _ in range(5):
        before = woken()
        for _ in range(100):
            dist.all_reduce(tensor, async_op=True).wait()
        series.append(woken() - before)
    # The monitor has one go on that nobody waits for, as when a rank is stopped before it does.
    assert min(series) == 0, series


@pytest.mark.ranks((1, 2, 3, 4))
def test_operations_that_follow_one_that_nobody_has_waited_for_come_after_it(world):
    for last in (True, False):
        tensor = torch.ones(1000)
        first = dist.all_reduce(tensor, async_op=True)
        second = dist.all_reduce(tensor, async_op=last)
        if last:
            second.wait()
        assert_same(tensor, torch.full((1000,), float(world**2)))
        assert wait_for(first.is_completed)


@pytest.mark.ranks(2)
def test_a_rank_that_waits_late_holds_up_nobody(store):
    tensor = torch.ones(1000)
    work = dist.all_reduce(tensor, async_op=True)
    if dist.get_rank() == 1:
        work.wait()
        store.set("rank 1 has the sum", "")
    else:
        store.wait(["rank 1 has the sum"])
        work.wait()
    assert_same(tensor, torch.full((1000,), 2.0))


@pytest.mark.ranks((1, 2, 3, 4))
def test_wait_returns_true_and_may_be_repeated(world):
    work = dist.all_reduce(torch.ones(100), async_op=True)
    for _ in range(3):
        assert work.wait()
    assert work.wait(datetime.timedelta(seconds=5))
    work.synchronize()
    assert work.is_completed() and exception_of(work) is None


@beyond_gloo
@pytest.mark.ranks((1, 2, 3, 4))
def test_result_and_future_hold_the_output_tensors(world):
    me = dist.get_rank()
    tensor = data(me, 100)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert work.result()[0].data_ptr() == tensor.data_ptr()
    assert work.get_future().value()[0].data_ptr() == tensor.data_ptr()
    output = torch.empty(world * 100)
    work = dist.all_gather_into_tensor(output, data(me, 100), async_op=True)
    work.wait()
    assert work.result()[0].data_ptr() == output.data_ptr()
    assert_same(work.get_future().wait()[0], torch.cat(all_data(world, 100)))


class Chained(catalogue.Case):
    def finish(self, name, work):
        work.get_future().then(lambda f: f.value()).wait()
        assert work.is_completed(), f"{name} has not completed"
        assert exception_of(work) is None, f"{name}: {exception_of(work)}"
        result = work.get_future_result().wait()
        assert result == 0, f"{name}: {result}"  # WorkResult.SUCCESS
        work.wait()


@beyond_gloo
@pytest.mark.ranks((1, 3))
@pytest.mark.parametrize("name", catalogue.OPERATIONS)
def test_every_operations_work_has_a_future_that_completes(world, name):
    catalogue.run(catalogue.OPERATIONS[name], [Chained(world, 3, "async")])


class Counted(catalogue.Case):
    def issue(self, name, *args, **kwargs):
        self.before = self.count()
        return super().issue(name, *args, **kwargs)

    def finish(self, name, work):
        super().finish(name, work)
        after = self.count()
        assert after == self.before + 1, f"{name}: {self.before}, then {after}"

    def count(self):
        return dist.group.WORLD._get_backend(CPU)._get_sequence_number_for_group()


@beyond_gloo
@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", catalogue.OPERATIONS)
def test_sequence_numbers_grow_by_one_per_collective_alike_on_every_rank(world, name):
    case = Counted(world, 3, "async")
    catalogue.run(catalogue.OPERATIONS[name], [case])
    everyone = [None] * world
    dist.all_gather_object(everyone, case.before)
    assert len(set(everyone)) == 1, everyone


@pytest.mark.ranks(2)
def test_recv_work_names_its_source(world):
    if dist.get_rank() == 0:
        dist.isend(torch.ones(5), 1).wait()
    else:
        work = dist.group.WORLD.recv_anysource([torch.empty(5)], 0)
        work.wait()
        assert work._source_rank() == 0


@beyond_gloo
@pytest.mark.ranks(2)
def test_duration_is_measured_once_timing_is_enabled(world):
    group = dist.new_group()
    work = dist.all_reduce(torch.ones(10), group=group, async_op=True)
    work.wait()
    with pytest.raises(RuntimeError, match="(?i)timing"):
        work._get_duration()
    group._enable_collectives_timing()
    begin = time.monotonic()
    work = dist.all_reduce(torch.ones(300_001), group=group, async_op=True)
    work.wait()
    took = 1000 * (time.monotonic() - begin)
    assert 0 < work._get_duration() <= took, (work._get_duration(), took)  # milliseconds
    dist.destroy_process_group(group)


@beyond_gloo
@pytest.mark.ranks((2, 3))
def test_a_work_dropped_without_wait_keeps_its_tensors_until_it_is_done(world):
    """The input's memory must not be reused while the operation reads it."""
    me, size, outputs = dist.get_rank(), 300_001, []
    for turn in range(6):
        output = torch.empty(world * size)
        dist.all_gather_into_tensor(output, data(me, size, salt=turn), async_op=True)
        outputs.append(output)
        for _ in range(3):  # whoever gets freed memory scribbles over it
            torch.full((size,), float("nan"))
    dist.barrier()
    for turn, output in enumerate(outputs):
        assert_same(output, torch.cat(all_data(world, size, salt=turn)), f"turn {turn}")


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.ranks(2)
def test_tensors_are_released_after_wait(world):
    """Of forty tensors of 4 MB not more than a few may stay."""
    before = resident()
    for _ in range(40):
        work = dist.all_reduce(torch.ones(1_000_000), async_op=True)
        work.wait()
        del work
    gc.collect()
    dist.barrier()
    assert wait_for(lambda: resident() < before + 60_000_000), (before, resident())


@beyond_gloo
@pytest.mark.ranks(1)
def test_repr_says_which_operation_it_is_and_how_far(world):
    work = dist.all_reduce(torch.ones(5), async_op=True)
    work.wait()
    what = r"all_reduce #\d+ \(5 x Float, SUM\) of group '\S+' on rank 0"
    assert re.fullmatch(rf"Work\({what}, timeout [\d.]+ s, COMPLETED\)", repr(work)), repr(work)


@pytest.mark.ranks(2)
def test_wait_with_a_timeout_raises_in_time(store):
    """A short wait(timeout) raises long before the group's 30 s, and says what it waited for."""
    group = dist.new_group()
    dist.barrier(group)
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(5), group=group, async_op=True)
        with time_limit(0.25, 15, "wait(0.3 s)"):
            with pytest.raises(RuntimeError, match="(?i)time") as error:
                work.wait(SOON)
        store.set("raised", "1")
        if BACKEND == "torchcomms":
            import torchcomms_pg

            assert isinstance(error.value, torchcomms_pg.CommError)
            assert "all_reduce" in str(error.value) or "allreduce" in str(error.value)
    else:
        store.wait(["raised"])
    dist.distributed_c10d._abort_process_group(group)


@beyond_gloo
@pytest.mark.ranks(2)
def test_a_failed_operation_is_visible_in_wait_exception_and_future_alike(world):
    """Never a success: not in is_success, not in the future, not in a second wait."""
    import torchcomms_pg

    group = dist.new_group()
    dist.barrier(group)
    group.set_timeout(datetime.timedelta(seconds=1))  # once all have come
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(5), group=group, async_op=True)
        for _ in range(2):
            with pytest.raises(torchcomms_pg.CommError):
                work.wait()
        assert work.is_completed()
        assert exception_of(work) is not None
        with pytest.raises(RuntimeError, match="(?i)all_?reduce"):
            work.get_future().wait()
        assert work.get_future_result().wait() != 0
    dist.barrier()
    dist.distributed_c10d._abort_process_group(group)


@beyond_gloo
@pytest.mark.ranks(2)
def test_completion_hook_sees_every_operation(world):
    group = dist.new_group()
    seen = []
    group._enable_collectives_timing()
    group._register_on_completion_hook(lambda info: seen.append(info))
    for _ in range(3):
        dist.all_reduce(torch.ones(5), group=group)
    dist.broadcast(torch.ones(5), 0, group=group, async_op=True).wait()
    group._wait_for_pending_works()
    assert wait_for(lambda: len(seen) == 4), [info.op_type for info in seen]
    assert [info.seq for info in seen] == list(range(seen[0].seq, seen[0].seq + 4))
    assert "ALLREDUCE" in str(seen[0].op_type) and "BROADCAST" in str(seen[3].op_type)
    assert all(info.time_finished >= info.time_started for info in seen)
    dist.destroy_process_group(group)


@beyond_gloo
@pytest.mark.ranks(2)
def test_a_completion_hook_may_raise_and_a_second_is_refused(world):
    group, seen = dist.new_group(), []

    def hook(info):
        seen.append(info.seq)
        raise KeyError("mine")

    group._register_on_completion_hook(hook)
    for _ in range(2):
        dist.all_reduce(torch.ones(5), group=group, async_op=True).wait()
    group._wait_for_pending_works()
    assert seen == [seen[0], seen[0] + 1]
    with pytest.raises(dist.DistBackendError, match="OnCompletion hook already registered"):
        group._register_on_completion_hook(hook)
    dist.destroy_process_group(group)


@beyond_gloo
@pytest.mark.ranks(2)
def test_a_python_callback_that_raises_fails_the_chained_future_only(world):
    work = dist.all_reduce(tensor := torch.ones(5), async_op=True)

    def broken(future):
        raise KeyError("mine")

    chained = work.get_future().then(broken)
    with pytest.raises(Exception, match="mine"):
        chained.wait()
    work.wait()
    assert_reduced(tensor, [torch.ones(5)] * 2)
