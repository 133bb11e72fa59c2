"""One rank's work: trains a small convolutional network with DDP, then tests it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from torchcomms_pg.demo import data


@dataclass(frozen=True)
class Job:
    """The settings of one training, which are equal on all its ranks."""

    backend: str
    ranks: int
    epochs: int
    batch: int = 32
    """Images per rank and step."""
    learning_rate: float = 0.1
    seed: int = 0


@dataclass(frozen=True)
class Result:
    """The outcome of a training, as rank 0 saw it."""

    accuracy: float
    """Share of the test images that were recognised."""
    images_per_second: float
    """Training speed of all ranks together: the median over the epochs."""
    loss: float
    """Mean training loss of the last epoch."""
    parameters: Tensor
    """Every trained parameter, in one row."""


def run_rank(rank: int, job: Job, folder: str) -> None:
    """Joins the other ranks through a store in `folder`, and trains on the images in `folder`.

    Rank 0 saves its result in the folder.
    """
    # A different seed on every rank: no two ranks drop the same neurons. DDP gives all ranks the
    # parameters of rank 0.
    torch.manual_seed(job.seed + rank)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // job.ranks))
    store = dist.FileStore(os.path.join(folder, "store"), job.ranks)
    dist.init_process_group(job.backend, store=store, rank=rank, world_size=job.ranks)
    tensors = torch.load(data_file(folder), weights_only=True)
    training, test = data.Split(*tensors[:2]), data.Split(*tensors[2:])
    result = train(rank, job, training, test)
    if rank == 0:
        torch.save(vars(result), result_file(folder))
    # Not in a `finally`: a rank that has failed must end, and not wait for the other ranks.
    dist.destroy_process_group()


def data_file(folder: str) -> Path:
    """Returns the path of the file with the images and digits of training, then of the test."""
    return Path(folder) / "data.pt"


def result_file(folder: str) -> Path:
    """Returns the path of the file in which rank 0 saves the fields of its `Result`."""
    return Path(folder) / "result.pt"


def train(rank: int, job: Job, training: data.Split, test: data.Split) -> Result:
    """Trains on this rank's share of every epoch and returns the outcome."""
    model = DistributedDataParallel(build_model())
    steps = data.steps_per_epoch(len(training), size=job.batch, ranks=job.ranks)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=job.learning_rate, momentum=0.9, weight_decay=1e-4, nesterov=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=job.learning_rate, total_steps=steps * job.epochs
    )
    speeds: list[float] = []
    images_per_step = job.batch * job.ranks
    # disable=None shows no progress bar if the output is not a terminal.
    with tqdm(
        total=steps * job.epochs * images_per_step,
        desc=f"{job.backend:<10}",
        unit=" images",
        disable=True if rank else None,
    ) as bar:
        for epoch in range(job.epochs):
            model.train()
            total = torch.zeros(())
            start = time.perf_counter()
            for images, digits in data.batches(
                training, size=job.batch, epoch=epoch, seed=job.seed, rank=rank, ranks=job.ranks
            ):
                loss = nn.functional.cross_entropy(model(images), digits)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                total += loss.detach()
                bar.update(images_per_step)
            mean_loss = mean_over_ranks(total / steps, job.ranks)
            speeds.append(steps * images_per_step / (time.perf_counter() - start))
            bar.set_postfix(epoch=epoch + 1, loss=f"{mean_loss:.3f}")
    accuracy = accuracy_on(model, test, rank, job.ranks)
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    return Result(accuracy, median(speeds), mean_loss, parameters)


def build_model() -> nn.Module:
    """Returns a network of two convolutions for images of 8 x 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def mean_over_ranks(value: Tensor, ranks: int) -> float:
    """Returns the mean of a number over the ranks."""
    dist.all_reduce(value)
    return value.item() / ranks


@torch.no_grad()
def accuracy_on(model: nn.Module, test: data.Split, rank: int, ranks: int) -> float:
    """Returns the share of the test images that are recognised; each rank tests a part of them."""
    model.eval()
    correct = (model(test.images[rank::ranks]).argmax(1) == test.digits[rank::ranks]).sum()
    dist.all_reduce(correct)
    return float(correct.item()) / len(test)
