"""Packages that start the ranks themselves, and say gloo, run over torchcomms unchanged.

Each is skipped where it is not installed; docs/gloo.md has versions.
"""

import os
import socket
import subprocess
import sys

import pytest

from harness.programs import run_program

pytestmark = [pytest.mark.beyond_gloo, pytest.mark.slow, pytest.mark.timeout(180)]

OVER = """
import torch
import torch.distributed as dist

def over():
    return type(dist.group.WORLD._get_backend(torch.device("cpu"))).__module__
"""


def output_of(tmp_path, program, *command):
    """Of a program under the name gloo, which has to succeed."""
    file = tmp_path / "program.py"
    file.write_text(OVER + program)
    done = run_program(
        [sys.executable, *command, file],
        env={**os.environ, "TORCHCOMMS_PG_AS_GLOO": "1", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


RAY = """
import ray, tempfile
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

def trained(prepare, part):
    torch.manual_seed(1)
    net = prepare(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in zip(torch.randn(4, 8, 4), torch.randn(4, 8, 2)):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x[part]), y[part]).backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]

def train():
    rank = ray.train.get_context().get_world_rank()
    spread = trained(ray.train.torch.prepare_model, slice(rank, None, 2))
    alone = trained(lambda net: net, slice(None))
    torch.testing.assert_close(spread, alone)
    assert (over(), dist.get_backend(), dist.get_world_size()) == ("torchcomms_pg._C", "gloo", 2)

ray.init(num_cpus=3, include_dashboard=False, _node_ip_address="127.0.0.1")
TorchTrainer(
    train,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=tempfile.mkdtemp(dir=".")),
).fit()
"""


def test_ray_train(tmp_path):
    """The parameters that two workers train are those of one process."""
    pytest.importorskip("ray.train.torch")
    output_of(tmp_path, RAY.replace('dir="."', f'dir="{tmp_path}"'))


TORCHRL = """
import socket
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.collectors.distributed import DistributedSyncCollector
from torchrl.envs import PendulumEnv

def act(angle):
    return angle.new_zeros(angle.shape + (1,))

if __name__ == "__main__":
    collector = DistributedSyncCollector(
        [PendulumEnv, PendulumEnv],
        TensorDictModule(act, in_keys=["th"], out_keys=["action"]),
        frames_per_batch=20,
        total_frames=60,
        collector_class=Collector,
        backend="gloo",
        launcher="mp",
        tcp_port="PORT",
    )
    frames = [data.numel() for data in collector]
    print("over", over(), frames)
    collector.shutdown()
"""


def test_torchrl(tmp_path):
    """Workers that leave once their batches have been sent send all of them."""
    pytest.importorskip("torchrl")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    output = output_of(tmp_path, TORCHRL.replace("PORT", str(port)))
    assert "over torchcomms_pg._C [20, 20, 20]" in output


TORCHREC = """
import torchrec
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise, construct_module_sharding_plan, row_wise, table_wise
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
cpu = torch.device("cpu")
tables = [
    torchrec.EmbeddingBagConfig(
        name=f"table{i}", embedding_dim=8, num_embeddings=32, feature_names=[f"feature{i}"]
    )
    for i in range(2)
]
for sharding in (lambda i: table_wise(rank=i), lambda i: row_wise(), lambda i: column_wise([0, 1])):
    torch.manual_seed(1)
    whole = torchrec.EmbeddingBagCollection(device=cpu, tables=tables)
    sharder = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        whole,
        {f"table{i}": sharding(i) for i in range(2)},
        sharder,
        local_size=world,
        world_size=world,
        device_type="cpu",
    )
    model = DistributedModelParallel(
        torchrec.EmbeddingBagCollection(device=cpu, tables=tables),
        device=cpu,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        plan=ShardingPlan({"": plan}),
        sharders=[sharder],
    )
    for name, parameter in model.state_dict().items():
        for shard in parameter.local_shards():
            rows, columns = shard.metadata.shard_offsets
            height, width = shard.metadata.shard_sizes
            of = whole.state_dict()[name]
            shard.tensor.copy_(of[rows : rows + height, columns : columns + width])
    torch.manual_seed(10 + rank)
    features = torchrec.KeyedJaggedTensor.from_lengths_sync(
        keys=["feature0", "feature1"],
        values=torch.randint(0, 32, (24,)),
        lengths=torch.full((8,), 3),
    )
    found = model(features).wait().values()
    torch.testing.assert_close(found, whole(features).values())
    found.sum().backward()
print("over", over())
dist.destroy_process_group()
"""


def test_torchrec(tmp_path):
    """Embeddings sharded in each way are those of one process."""
    pytest.importorskip("torchrec")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert output_of(tmp_path, TORCHREC, *launcher).count("torchcomms_pg._C") == 2
