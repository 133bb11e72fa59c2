"""Real images that need no download: the handwritten digits that scikit-learn ships."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

TEST_SHARE = 0.2


@dataclass(frozen=True)
class Split:
    """Images of shape (n, 1, 8, 8), scaled to zero mean and unit variance, and their digits."""

    images: Tensor
    digits: Tensor

    def __len__(self) -> int:
        return len(self.images)


def load(seed: int) -> tuple[Split, Split]:
    """Returns the training and the test split, which share no image.

    The scaling is computed from the training images alone.
    """
    from sklearn.datasets import load_digits  # takes seconds, and the ranks do not need it

    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1)
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    cut = int(len(images) * TEST_SHARE)
    test, train = order[:cut], order[cut:]
    mean, std = images[train].mean(), images[train].std()
    images = (images - mean) / std
    return Split(images[train], labels[train]), Split(images[test], labels[test])


def batches(
    split: Split, *, size: int, epoch: int, seed: int, rank: int, ranks: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields this rank's batches of one epoch, from a random order that all ranks agree on.

    Every rank gets the same number of full batches. The remaining images are left out: different
    images in each epoch.
    """
    generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
    order = torch.randperm(len(split), generator=generator)
    for step in range(steps_per_epoch(len(split), size=size, ranks=ranks)):
        first = (step * ranks + rank) * size
        chosen = order[first : first + size]
        yield split.images[chosen], split.digits[chosen]


def steps_per_epoch(images: int, *, size: int, ranks: int) -> int:
    """Returns how many batches each rank trains on in one epoch."""
    return images // (size * ranks)
