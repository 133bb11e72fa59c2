"""What people build on torch.distributed runs over torchcomms on two CPU ranks.

By its name, and by the name gloo, under which a program need not be changed.

Each is skipped where it is not installed: ``pip install -e '.[ecosystem]'``. docs/gloo.md
tells users the same.
"""

import datetime
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import ROOT, TESTS
from harness.comms import torchcomms
from harness.programs import end_tree
from harness.ranks import Ranks
from torchcomms_pg import as_gloo, check_async
from torchcomms_pg.trace import load, nccl_hazards

pytestmark = [pytest.mark.beyond_gloo, pytest.mark.slow, pytest.mark.timeout(180)]
CPU = torch.device("cpu")


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def samples():
    torch.manual_seed(2)
    return torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 2))


by_name = pytest.mark.parametrize("name", ["torchcomms", "gloo"])


def launch(package, body, *args, world=2, **env):
    """Runs `body` on ranks with the environment that torchrun gives; what they return.

    What they do has no hazard for NCCL.
    """
    pytest.importorskip(package)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = dict(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(server.port),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="test",
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCH_FR_BUFFER_SIZE="100000",
        **env,
    )
    with tempfile.TemporaryDirectory() as folder:
        environment["TORCHCOMM_FR_DUMP_TEMP_FILE"] = f"{folder}/rank_"
        with Ranks(world, init=False, env=environment) as ranks:
            results = ranks.run(body, *args, timeout=150)
            ranks.run(dump)
        report = nccl_hazards(load(pathlib.Path(folder)))
    assert not report.found, str(report)
    return results


def dump():
    torchcomms().hooks.process_recorder().dump_file()


def is_ours(group=None):
    import torchcomms_pg

    group = group or dist.group.WORLD
    return isinstance(group._get_backend(CPU), torchcomms_pg.Backend)


def reference(healing=False):
    """What one process makes of all of the data.

    healing: the first step takes the mean over two replicas of which the second gives nothing.
    """
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    inputs, targets = samples().tensors
    for step in range(0, 16, 4):
        alone = healing and step == 0
        now = slice(step, step + (2 if alone else 4))
        loss = nn.functional.mse_loss(net(inputs[now]), targets[now])
        optimizer.zero_grad()
        (loss / 2 if alone else loss).backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def assert_trained(ranks, want=None):
    want = want or reference()
    for parameters in ranks:
        for got, expected in zip(parameters, want):
            torch.testing.assert_close(got, expected)


def with_accelerate(name):
    from accelerate import Accelerator
    from accelerate.utils import gather_object

    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    if name == "gloo":
        as_gloo.install()
    else:
        dist.init_process_group(name)  # the line that selects the backend
    accelerator = Accelerator(cpu=True)
    assert is_ours() and accelerator.num_processes == 2
    net = model()
    loader = torch.utils.data.DataLoader(samples(), batch_size=2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(net(inputs), targets))
        optimizer.step()
    me = accelerator.process_index
    assert accelerator.gather(torch.tensor([me])).tolist() == [0, 1]
    assert accelerator.reduce(torch.tensor([me + 1.0]), "mean").item() == 1.5
    assert gather_object([me]) == [0, 1]
    assert accelerator.gather_for_metrics([me], use_gather_object=True) == [0, 1]
    accelerator.wait_for_everyone()
    result = [p.detach() for p in accelerator.unwrap_model(net).parameters()]
    accelerator.end_training()
    return result


@by_name
def test_accelerate(name):
    assert_trained(launch("accelerate", with_accelerate, name))


def with_lightning(name):
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    as_gloo.install()

    os.environ["LOCAL_RANK"] = os.environ["RANK"]

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model()

        def training_step(self, batch, index):
            inputs, targets = batch
            loss = nn.functional.mse_loss(self.net(inputs), targets)
            self.log("loss", loss, sync_dist=True, on_epoch=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    strategy = DDPStrategy(process_group_backend=name)  # the line that selects the backend
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    sampler = torch.utils.data.DistributedSampler(
        samples(), num_replicas=2, rank=int(os.environ["RANK"]), shuffle=False
    )
    loader = torch.utils.data.DataLoader(samples(), batch_size=2, sampler=sampler)
    trainer.fit(module, loader)
    assert is_ours() and trainer.world_size == 2
    mean = trainer.callback_metrics["loss_epoch"].item()
    assert trainer.strategy.all_gather(torch.tensor(mean)).unique().numel() == 1
    return [p.detach() for p in module.net.parameters()]


@by_name
def test_lightning(name):
    assert_trained(launch("lightning", with_lightning, name))


def with_transformers(name, folder):
    """The tokens that a model generates, its layers spread over the ranks."""
    from transformers import AutoModelForCausalLM

    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    if name == "gloo":
        as_gloo.install()
    else:
        dist.init_process_group(name)  # the line that selects the backend
    spread = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    assert is_ours() and dist.get_world_size() == 2
    layer = spread.model.layers[0].mlp.down_proj
    assert layer.weight.to_local().numel() * 2 == layer.weight.numel()
    return generate(spread)


def generate(language_model):
    prompt = torch.arange(1, 9).unsqueeze(0)
    tokens = language_model.generate(prompt, max_new_tokens=12, do_sample=False)
    return tokens.tolist()


@by_name
def test_transformers(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    whole = transformers.LlamaForCausalLM(config)
    whole.save_pretrained(tmp_path)
    for tokens in launch("transformers", with_transformers, name, str(tmp_path)):
        assert tokens == generate(whole)


def with_deepspeed(name, stage):
    import deepspeed

    as_gloo.install()

    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    # Without DeepSpeed's own all-reduce for CPUs, which would be compiled here, and take work away.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=name)  # the line that selects the backend
    net = model()
    config = dict(
        train_micro_batch_size_per_gpu=2,
        gradient_clipping=0.0,
        zero_optimization=dict(stage=stage),
        zero_allow_untested_optimizer=True,
        zero_force_ds_cpu_optimizer=False,
    )
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), config=config
    )
    assert is_ours()
    me = dist.get_rank()
    inputs, targets = samples().tensors
    for step in range(0, 16, 4):
        mine = slice(step + 2 * me, step + 2 * me + 2)
        engine.backward(nn.functional.mse_loss(engine(inputs[mine]), targets[mine]))
        engine.step()
    if stage < 3:
        return [p.detach().clone() for p in engine.module.parameters()]
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return [p.detach().clone() for p in engine.module.parameters()]


def with_deepspeed_checked(name, stage):
    check_async.start()
    try:
        trained = with_deepspeed(name, stage)
    finally:
        findings = check_async.finish()
    return trained, findings.as_dict()


@by_name
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_zero_has_no_early_use(name, stage):
    ranks = launch("deepspeed", with_deepspeed_checked, name, stage, DS_ACCELERATOR="cpu")
    assert_trained([trained for trained, _ in ranks])
    report = check_async.merged(check_async.Findings.from_dict(found) for _, found in ranks)
    assert not report.found, f"{report}"
    assert report.operations or stage < 3


def torchft_group():
    """A torchft process group over torchcomms; docs/gloo.md shows the same class."""
    from torch.distributed import ProcessGroup
    from torchft.process_group import ProcessGroupWrapper

    import torchcomms_pg

    class ProcessGroupTorchComms(ProcessGroupWrapper):
        def getBackendName(self):  # noqa: N802
            return "torchft-torchcomms"

        def _create_pg(self, store, rank, world_size):
            options = torchcomms_pg.Backend.Options(timeout=datetime.timedelta(seconds=20))
            backend = torchcomms_pg.Backend(store, rank, world_size, options)
            group = ProcessGroup(store, rank, world_size)
            group._register_backend(CPU, ProcessGroup.BackendType.CUSTOM, backend)
            group._set_default_backend(ProcessGroup.BackendType.CUSTOM)
            return group

    return ProcessGroupTorchComms()


def with_torchft():
    from torchft import DistributedDataParallel, Manager, Optimizer

    rank = int(os.environ["RANK"])
    os.environ.update(RANK="0", WORLD_SIZE="1")  # each replica group has one rank
    net = model()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=torchft_group(),
        min_replica_size=2,
        load_state_dict=net.load_state_dict,
        state_dict=net.state_dict,
        replica_id=f"replica{rank}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=os.environ["TORCHFT_LIGHTHOUSE"],
        timeout=datetime.timedelta(seconds=30),
    )
    net = DistributedDataParallel(manager, net)
    optimizer = Optimizer(manager, torch.optim.SGD(net.parameters(), lr=0.1))
    inputs, targets = samples().tensors
    for step in range(0, 16, 4):
        optimizer.zero_grad()
        mine = slice(step + 2 * rank, step + 2 * rank + 2)
        nn.functional.mse_loss(net(inputs[mine]), targets[mine]).backward()
        optimizer.step()
    result = [p.detach().clone() for p in net.parameters()]
    assert manager.num_participants() == 2 and manager.current_step() == 4
    manager.shutdown(wait=False)
    return result


LIGHTHOUSE = """
import sys
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=10_000)
print(server.address(), flush=True)
sys.stdin.read()
"""
REPLICA = """
import os, sys, torch
from frameworks import test_ecosystem
torch.save(test_ecosystem.with_torchft(), sys.argv[1])
os._exit(0)
"""


def test_torchft_managed_groups(tmp_path):
    """Two replica groups; the second heals in the first step, which trains on the first's data."""
    pytest.importorskip("torchft")
    path = os.pathsep.join([str(TESTS), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=path)
    python = [sys.executable, "-c"]
    files = [tmp_path / f"replica{rank}.pt" for rank in range(2)]
    with subprocess.Popen(
        [*python, LIGHTHOUSE],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as lighthouse:
        environment["TORCHFT_LIGHTHOUSE"] = lighthouse.stdout.readline().strip()
        replicas = [
            subprocess.Popen(
                [*python, REPLICA, str(file)],
                env=dict(environment, RANK=str(rank)),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank, file in enumerate(files)
        ]
        try:
            for replica in replicas:
                output, _ = replica.communicate(timeout=150)
                assert replica.returncode == 0, output
        finally:
            for replica in replicas:
                end_tree(replica.pid)
            lighthouse.kill()
    assert_trained([torch.load(file) for file in files], reference(healing=True))
