"""Distributed checkpoints: saved, loaded, saved in the background, and resharded, as over Gloo."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from harness.parity import REFERENCE, assert_equal, like_gloo, run_over
from harness.ranks import BACKEND, Ranks, pool
from harness.values import data

pytestmark = pytest.mark.torch_version


class Training(Stateful):
    """A sharded model and its optimizer, as the documentation of DCP wraps them."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        world = dist.get_world_size()
        self.net = nn.Sequential(nn.Linear(11, 13), nn.ReLU(), nn.Linear(13, 5))
        fully_shard(self.net, mesh=init_device_mesh("cpu", (world,)))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)

    def state_dict(self):
        model, optimizer = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        set_state_dict(
            self.net,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def train(self, steps=2):
        for step in range(steps):
            self.optimizer.zero_grad()
            self.net(data(0, (4, 11), salt=step)).square().mean().backward()
            self.optimizer.step()
        return self.whole()

    def whole(self):
        moments = [self.optimizer.state[p]["exp_avg"] for p in self.net.parameters()]
        return list(self.net.parameters()), moments


@like_gloo(2)
@pytest.mark.parametrize("how", ["save", "async_save"])
def test_save_and_load(how, tmp_path):
    folder = tmp_path / dist.get_backend()
    training = Training(1)
    training.train()
    state = {"app": training, "rank 0 says": "hello", "step": 7}
    if how == "save":
        dcp.save(state, checkpoint_id=folder)
    else:
        gloo = dist.new_group(backend="gloo") if dist.get_backend() == "gloo" else None
        dcp.async_save(state, checkpoint_id=folder, process_group=gloo).result()
    other = Training(2)
    dcp.load({"app": other}, checkpoint_id=folder)
    names = sorted(file.name for file in folder.iterdir())
    return training.whole(), other.whole(), other.train(), names


@like_gloo(3, rounding=True)
def test_a_checkpoint_of_dtensors_is_loaded_with_other_placements(tmp_path):
    mesh = init_device_mesh("cpu", (3,))
    whole = data(0, (7, 5))
    folder = tmp_path / dist.get_backend()
    dcp.save({"x": distribute_tensor(whole, mesh, [Shard(0)])}, checkpoint_id=folder)
    target = distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1)])
    dcp.load({"x": target}, checkpoint_id=folder)
    alone = {"x": torch.zeros(7, 5)}
    dcp.load(alone, checkpoint_id=folder)
    assert torch.equal(target.full_tensor(), whole) and torch.equal(alone["x"], whole)
    return target.to_local(), alone["x"]


def written(folder):
    training = Training(3)
    training.train()
    dcp.save({"app": training}, checkpoint_id=folder)
    return training.whole()


def read(folder):
    training = Training(4)
    training.train(1)  # so that the optimizer has a state
    dcp.load({"app": training}, checkpoint_id=folder)
    return training.whole()


def run(world, backend, body, folder):
    """The results of a default group of so many ranks."""
    return pool(world, init=False).run(
        run_over, backend, Ranks.store_args(), world, body, {"folder": folder}, {}
    )


@pytest.mark.parametrize("reader", [BACKEND, REFERENCE])
def test_two_ranks_save_and_three_load(reader, tmp_path):
    """A checkpoint of one backend is one for another."""
    folder = str(tmp_path / "checkpoint")
    want = run(2, BACKEND, written, folder)[0]
    for got in run(3, reader, read, folder):
        assert_equal(got, want)
