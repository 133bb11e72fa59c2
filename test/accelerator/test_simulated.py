"""The simulated accelerator behaves as a GPU would: what lacks a wait goes wrong."""

import time

import pytest
import torch

pytestmark = pytest.mark.torch_version

simulated = pytest.importorskip("simulated")

try:
    sim = simulated.install()
except ModuleNotFoundError:
    pytest.skip("python test/simulated/build.py builds it", allow_module_level=True)


@pytest.fixture(autouse=True)
def no_delays():
    yield
    simulated.set_delays(longest_us=0)
    sim.synchronize_all()


def filled(value, size=1000, device="sim"):
    return torch.full((size,), float(value), device=device)


def test_operators_are_those_of_the_cpu():
    values = torch.randn(6, 5)
    ours = values.to("sim")
    assert ours.device == torch.device("sim:0") and ours.is_sim
    expected = torch.nn.functional.softmax(values @ values.t() + 1, dim=0)
    torch.testing.assert_close(
        torch.nn.functional.softmax(ours @ ours.t() + 1, dim=0).cpu(), expected
    )
    assert torch.equal(torch.cat([ours, ours[:, :2].t().reshape(2, -1)[:, :5]]).cpu()[:6], values)
    assert ours.sum().item() == values.sum().item()
    assert torch.equal(torch.nonzero(ours > 0).cpu(), torch.nonzero(values > 0))


def test_operators_return_before_they_have_run():
    values = filled(1)
    with simulated.hold():
        values.add_(1)
        more = values * 3
        assert not sim.current_stream().query()
    assert more.cpu()[0] == 6 and sim.current_stream().query()


def test_streams_run_side_by_side_and_in_their_own_order():
    first, second = sim.Stream(), sim.Stream()
    values = filled(1)
    sim.synchronize()
    with simulated.hold(first):
        with sim.stream(first):
            values.add_(1)
        with sim.stream(second):
            seen = values.clone()
        second.synchronize()  # does not wait for the first
    first.synchronize()
    assert seen.cpu()[0] == 1 and values.cpu()[0] == 2


def test_an_event_orders_streams():
    first, second, event = sim.Stream(), sim.Stream(), sim.Event()
    values = filled(1)
    sim.synchronize()
    with simulated.hold(first):
        with sim.stream(first):
            values.add_(1)
            event.record(first)
        assert not event.query()
        second.wait_event(event)
        with sim.stream(second):
            seen = values.clone()
        assert not second.query()
    second.synchronize()
    assert event.query() and seen.cpu()[0] == 2


def test_an_event_that_is_recorded_again_still_releases_those_that_waited():
    first, second, event = sim.Stream(), sim.Stream(), sim.Event()
    event.record(first)
    second.wait_event(event)
    with simulated.hold(first):
        event.record(first)
        second.synchronize()
        assert not event.query()
    event.synchronize()


def test_a_missing_wait_shows_as_wrong_numbers():
    side = sim.Stream()
    values = filled(1)
    sim.synchronize()
    with simulated.hold(side):
        with sim.stream(side):
            values.add_(1)
        assert values.cpu()[0] == 1, "the current stream went on without the side stream"


def test_memory_is_poisoned_when_its_stream_uses_it_again():
    side = sim.Stream()
    values = filled(1)
    sim.synchronize()
    with simulated.hold(side):
        with sim.stream(side):
            late = values.clone()
        address = values.data_ptr()
        del values
        assert torch.empty(1000, device="sim").data_ptr() == address
        sim.current_stream().synchronize()
    side.synchronize()
    assert late.isnan().all().item()


def test_freed_memory_is_used_again_by_its_stream_only():
    values = filled(1)
    address = values.data_ptr()
    del values
    with sim.stream(sim.Stream()):
        assert filled(2).data_ptr() != address
    assert filled(3).data_ptr() == address


def test_record_stream_keeps_memory_until_that_stream_is_done():
    side = sim.Stream()
    values = filled(7)
    sim.synchronize()
    with simulated.hold(side):
        with sim.stream(side):
            late = values.clone()
        values.record_stream(side)
        address = values.data_ptr()
        del values
        again = torch.empty(1000, device="sim")
        assert again.data_ptr() == address and not sim.current_stream().query()
    side.synchronize()
    assert late.cpu()[0] == 7


def test_copies_from_pageable_memory_take_what_is_there_now():
    source = torch.ones(1000)
    with simulated.hold():
        copy = source.to("sim", non_blocking=True)
        source.zero_()
    assert copy.cpu()[0] == 1


def test_copies_from_pinned_memory_are_asynchronous():
    source = torch.ones(1000).pin_memory()
    assert source.is_pinned() and not torch.ones(3).is_pinned()
    with simulated.hold():
        copy = source.to("sim", non_blocking=True)
        source.zero_()
    assert copy.cpu()[0] == 0


def test_random_numbers_depend_on_the_seed_and_not_on_time():
    simulated.set_delays(seed=3, probability=1, longest_us=500)
    draws = []
    for _ in range(2):
        torch.manual_seed(11)
        draws.append(torch.cat([torch.randn(50, device="sim") for _ in range(3)]).cpu())
    assert torch.equal(*draws) and not torch.equal(draws[0][:50], draws[0][50:100])
    state = sim.get_rng_state()
    first = torch.rand(5, device="sim").cpu()
    sim.set_rng_state(state)
    assert torch.equal(torch.rand(5, device="sim").cpu(), first)


def test_devices_are_apart():
    assert torch.accelerator.current_accelerator().type == "sim"
    assert torch.accelerator.device_count() == sim.device_count() == 2
    with sim.device(1):
        there = filled(5, device="sim")
    assert there.device.index == 1 and sim.current_device() == 0
    assert there.to("sim:0").cpu()[0] == 5


def test_a_generator_is_of_a_device_that_exists():
    first, second = (torch.Generator("sim:1").manual_seed(3) for _ in range(2))
    drawn = [torch.rand(4, device="sim:1", generator=it).cpu() for it in (first, second, first)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    with pytest.raises(ValueError, match="there is no device sim:5"):
        torch.Generator("sim:5")


@pytest.mark.parametrize("index, current", [(1, 1), (0, 0), (5, 0), (-1, 0)])
def test_a_device_is_exchanged_for_one_that_exists_alone(index, current):
    exchange = simulated._extension().maybe_exchange_device
    try:
        assert exchange(index) == 0 and sim.current_device() == current
    finally:
        sim.set_device(0)


def test_delays_are_those_of_the_seed():
    """Streams dawdle: twenty operators take about ten milliseconds each."""
    simulated.set_delays(seed=1, probability=1, longest_us=20000)
    values = filled(0)
    begin = time.monotonic()
    for _ in range(20):
        values.add_(1)
    assert values.cpu()[0] == 20
    assert time.monotonic() - begin > 0.1


def test_a_model_trains_as_on_the_cpu():
    simulated.set_delays(seed=2, probability=0.2, longest_us=300)
    results = []
    for device in ("cpu", "sim"):
        torch.manual_seed(5)
        model = torch.nn.Sequential(
            torch.nn.Linear(6, 16), torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Linear(16, 3)
        ).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).to(device)
        for _ in range(3):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), inputs.argmax(1) % 3).backward()
            optimizer.step()
        results.append([p.detach().cpu() for p in model.parameters()])
    for ours, expected in zip(results[1], results[0]):
        torch.testing.assert_close(ours, expected)


def test_an_operator_that_fails_late_is_told_at_the_next_synchronisation():
    with pytest.raises(RuntimeError, match="(?i)index"):
        torch.ones(3, device="sim")[torch.tensor([7], device="sim")].cpu()
    assert torch.ones(3, device="sim").sum().item() == 3
