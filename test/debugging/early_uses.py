"""Programs that use tensors of asynchronous operations too early, and programs that do not.

Each runs on one rank of a group of one. Of a faulty program the comment "issue" marks the line that
issues the operation, and "then" the line that comes too early. `faults` and `fine` list them.
"""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc

faults, fine, threads = {}, {}, {}


def fault(kind):
    def add(program):
        faults[program.__name__] = (kind, program)
        return program

    return add


def thread(where, kind):
    """Marks a fault that a public thread describes."""

    def add(program):
        threads[where] = (kind, program)
        return program

    return add


def right(program):
    fine[program.__name__] = program
    return program


def gathered(tensor):
    """Returns an output for an all-gather on one rank, and the work."""
    output = torch.empty_like(tensor)
    return output, dist.all_gather_into_tensor(output, tensor, async_op=True)


@thread("DeepSpeed PR 8539", "read")
def only_the_last_of_several_works_is_waited_for():
    parameters = [torch.ones(3) for _ in range(3)]
    flat = [torch.empty(3) for _ in parameters]
    works = [
        dist.all_gather([buffer], parameter, async_op=True)  # issue
        for parameter, buffer in zip(parameters, flat, strict=True)
    ]
    works[-1].wait()
    for parameter, buffer in zip(parameters, flat, strict=True):
        parameter.data = buffer.narrow(0, 0, 3)
    torch.stack(parameters).sum()  # then


@thread("nanochat PR 843", "freed")
def only_the_future_of_a_gather_is_kept():
    def update():
        updated = torch.ones(4) * 2
        work = dist.all_gather([output], updated, async_op=True)  # issue
        return work.get_future()

    output = torch.empty(4)
    future = update()
    torch.full((4,), 7.0)
    future.wait()  # then


@thread("vllm-ascend PR 11961", "read")
def two_of_three_handles_are_ignored():
    def all_gather_async(tensor):
        output = torch.empty_like(tensor)
        return output, dist.all_gather([output], tensor, async_op=True)  # issue

    keys, _ = all_gather_async(torch.ones(4))
    scale, handle = all_gather_async(torch.ones(1))
    handle.wait()
    keys * scale  # then


@thread("DeepSpeed issue 8486", "again")
def one_handle_is_waited_for_by_each_of_its_parameters():
    class Handle:
        def __init__(self, parameter):
            self.parameter, self.full = parameter, torch.empty(4)
            self.work = dist.all_gather([self.full], torch.ones(4), async_op=True)  # issue

        def wait(self):
            self.work.wait()  # then
            self.parameter.available = True

    parameter = torch.nn.Parameter(torch.empty(0))
    in_flight = dict.fromkeys(("weight", "bias"), Handle(parameter))
    in_flight.pop("weight").wait()
    parameter.data, parameter.available = torch.empty(0), False
    in_flight.pop("bias").wait()


@thread("Megatron-LM PR 4047", "freed")
def the_output_of_a_stage_is_freed_while_it_is_sent():
    output, received = torch.ones(8), torch.empty(8)
    message = dist.isend(output, 0)  # issue
    output.data = torch.empty(1)
    dist.recv(received, 0)
    message.wait()  # then


@thread("sglang PR 28901", "input")
def a_buffer_is_filled_for_the_next_message():
    buffer, received = torch.zeros(4), torch.empty(4)
    messages = []
    for step in range(2):
        buffer.copy_(torch.full((4,), float(step)))  # then
        messages.append(dist.isend(buffer, 0))  # issue
    for message in messages:
        dist.recv(received, 0)
        message.wait()


@thread("aiter PR 4082", "input")
def an_input_is_filled_while_peers_may_read_it():
    shard, output = torch.ones(4), torch.empty(4)
    work = dist.all_gather_into_tensor(output, shard, async_op=True)  # issue
    shard.fill_(torch.nan)  # then
    work.wait()
    assert output.tolist() == [1.0] * 4


@thread("Anima-Standalone-Trainer PR 39", "read")
def the_result_is_transposed_before_the_wait():
    output = torch.empty(2, 3)
    work = dist.all_gather([output], torch.ones(2, 3), async_op=True)  # issue
    result = output.transpose(0, 1).contiguous()  # then
    work.wait()
    result.sum()


@thread("pytorch issue 180614", "read")
def a_compiled_graph_gets_a_result_without_its_wait():
    """Torches with the issue pass the inner tensor of a DTensor like this."""
    result = fc.all_reduce(torch.ones(4), "sum", dist.group.WORLD)  # issue
    torch.compile(lambda value: value * 2)(result.elem)  # then
    fc.wait_tensor(result)


@fault("read")
def an_output_is_read():
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, async_op=True)  # issue
    assert (tensor + 1).isnan().all()  # then
    work.wait()


@fault("read")
def an_output_is_read_by_another_thread():
    import threading

    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, async_op=True)  # issue
    reader = threading.Thread(target=lambda: tensor + 1)  # then
    reader.start()
    reader.join()
    work.wait()


@fault("read")
def a_backward_pass_reads_an_output():
    weight = torch.ones(2, requires_grad=True)
    factor = torch.ones(2)
    loss = (weight * factor).sum()
    work = dist.all_reduce(factor, async_op=True)  # issue
    loss.backward()  # then
    work.wait()


@fault("read")
def a_work_is_lost():
    tensor = torch.arange(4)
    dist.all_reduce(tensor, async_op=True)  # issue
    assert tensor.max() < 0  # then


@fault("read")
def a_future_is_lost():
    tensor = torch.arange(4.0)
    dist.all_reduce(tensor, async_op=True).get_future()  # issue
    dist.barrier()
    tensor.tolist()  # then


@fault("read")
def an_inner_tensor_of_an_async_tensor_is_read():
    result = fc.all_reduce(torch.ones(3), "sum", dist.group.WORLD)  # issue
    result.elem + 1  # then
    fc.wait_tensor(result)


@fault("read")
def a_message_of_a_batch_is_read():
    tensor, output = torch.ones(4), torch.empty(4)
    operations = [dist.P2POp(dist.isend, tensor, 0), dist.P2POp(dist.irecv, output, 0)]
    works = dist.batch_isend_irecv(operations)  # issue
    output + 1  # then
    for work in works:
        work.wait()
    assert output.tolist() == [1.0] * 4


@fault("write")
def an_output_is_written():
    output, work = torch.zeros(4), None
    work = dist.all_gather([output], torch.ones(4), async_op=True)  # issue
    output.add_(1)  # then
    work.wait()


@fault("input")
def an_input_is_written():
    tensor, output = torch.ones(4), torch.zeros(4)
    work = dist.all_gather([output], tensor, async_op=True)  # issue
    tensor.mul_(3)  # then
    work.wait()
    assert output.tolist() == [1.0] * 4


@fault("input")
def columns_share_bytes_with_a_row():
    table, output = torch.ones(4, 3), torch.zeros(4)
    work = dist.all_gather([output], table[:, 1], async_op=True)  # issue
    table[2].zero_()  # then
    work.wait()


@fault("read")
def a_column_is_reduced_and_read():
    table = torch.ones(4, 3)
    work = dist.all_reduce(table[:, 1], async_op=True)  # issue
    assert table.sum().isnan()  # then
    work.wait()


@fault("changed")
def a_column_is_reduced_and_written_through_numpy():
    table = torch.ones(4, 3)
    work = dist.all_reduce(table[:, 1], async_op=True)  # issue
    table.numpy()[2, 1] = 5
    work.wait()  # then


@fault("changed")
def an_input_is_written_through_numpy():
    tensor, output = torch.ones(4), torch.zeros(4)
    work = dist.all_gather([output], tensor, async_op=True)  # issue
    tensor.numpy()[2] = 5
    work.wait()  # then


@fault("changed")
def an_output_is_written_through_numpy():
    output = torch.zeros(4)
    work = dist.all_gather([output], torch.ones(4), async_op=True)  # issue
    output.numpy()[2] = 5
    work.wait()  # then


@fault("overlap")
def two_operations_have_one_output():
    tensor = torch.ones(4)
    first = dist.all_reduce(tensor, async_op=True)  # issue
    second = dist.all_reduce(tensor[2:], async_op=True)  # then
    first.wait()
    second.wait()


@fault("overlap")
def a_synchronous_operation_reads_an_output():
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, async_op=True)  # issue
    dist.all_reduce(tensor)  # then
    work.wait()


@right
def a_wait():
    tensor = torch.arange(4.0)
    dist.all_reduce(tensor, async_op=True).wait()
    assert (tensor + 1).tolist() == [1, 2, 3, 4]


@right
def a_poll():
    tensor = torch.arange(4.0)
    work = dist.all_reduce(tensor, async_op=True)
    while not work.is_completed():
        pass
    assert tensor.tolist() == [0, 1, 2, 3]
    work.wait()


@right
def a_future():
    tensor = torch.arange(4.0)
    work = dist.all_reduce(tensor, async_op=True)
    (value,) = work.get_future().wait()
    assert value is tensor and value.tolist() == [0, 1, 2, 3]


@right
def a_callback_of_a_future():
    tensor = torch.arange(4.0)
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future().then(lambda ended: ended.value()[0] * 2)
    assert future.wait().tolist() == [0, 2, 4, 6]
    tensor + 1


@right
def several_futures():
    tensors = [torch.ones(2), torch.ones(3)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    torch.futures.wait_all([work.get_future() for work in works])
    assert sum(tensor.sum() for tensor in tensors) == 5


@right
def a_result():
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert work.result()[0] is tensor


@right
def reads_of_an_input():
    tensor, output = torch.ones(4), torch.empty(4)
    work = dist.all_gather([output], tensor, async_op=True)
    assert (tensor * 2).sum() == 8
    output.view(2, 2).t()
    torch.empty_like(output)
    work.wait()
    assert output.sum() == 4


@right
def the_root_of_a_broadcast_reads():
    tensor = torch.ones(4)
    work = dist.broadcast(tensor, 0, async_op=True)
    assert tensor.sum() == 4
    work.wait()


@right
def disjoint_views():
    table, received = torch.zeros(4, 6), torch.empty(3)
    works = [dist.all_reduce(table[:2], async_op=True), dist.isend(table[3, 1::2], 0)]
    table[2:, 2].add_(1)
    table[3, ::2].add_(1)
    dist.recv(received, 0)
    for work in works:
        work.wait()
    assert received.tolist() == [0, 0, 0]


@right
def a_column_is_reduced():
    table = torch.arange(12.0).view(4, 3)
    work = dist.all_reduce(table[:, 1], async_op=True)
    assert table[:, 2].tolist() == [2, 5, 8, 11]
    work.wait()
    assert table.view(-1).tolist() == list(range(12))


@right
def memory_is_shared_until_a_write():
    source = torch.arange(4.0)
    tensor = torch._lazy_clone(source)
    work = dist.all_reduce(tensor, async_op=True)
    assert source.tolist() == [0, 1, 2, 3]
    work.wait()
    assert tensor.tolist() == source.tolist() == [0, 1, 2, 3]


@right
def an_input_in_its_output():
    output = torch.arange(4.0)
    work = dist.all_gather_into_tensor(output, output[:], async_op=True)
    work.wait()
    assert output.tolist() == [0, 1, 2, 3]


@right
def memory_that_is_used_again():
    for _ in range(100):
        dist.isend(torch.ones(16), 0)
        received = torch.empty(16)
        dist.recv(received, 0)
        torch.zeros(16).add_(1)


@right
def all_types():
    for dtype in (
        *(torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16),
        *(torch.float64, torch.complex64, torch.float8_e4m3fn),
    ):
        tensor, output = torch.ones(5).to(dtype), torch.zeros(5).to(dtype)
        work = dist.all_gather([output], tensor, async_op=True)
        work.wait()
        assert output.float().sum() == 5 if not dtype.is_complex else output.sum() == 5


@right
def functional_collectives():
    tensor = torch.arange(4.0)
    for result in (
        fc.all_reduce(tensor, "sum", dist.group.WORLD),
        fc.all_gather_tensor(tensor, 0, dist.group.WORLD),
        fc.reduce_scatter_tensor(tensor, "sum", 0, dist.group.WORLD),
        fc.all_to_all_single(tensor, None, None, dist.group.WORLD),
        *fc.all_reduce_coalesced([tensor], "sum", dist.group.WORLD),
    ):
        assert (result.view(2, 2) + 1).tolist() == [[1, 2], [3, 4]]


@right
def coalesced_collectives():
    tensors = [torch.ones(2), torch.ones(3)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert sum(tensor.sum() for tensor in tensors) == 5
