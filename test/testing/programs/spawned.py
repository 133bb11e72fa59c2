"""Ten tests of two ranks as torch's own suite has them, which docs/testing.md measures."""

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase


class TestSum(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()


def body(number):
    def test(self):
        store = dist.FileStore(self.file_name, 2)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=2)
        values = torch.full((10,), float(self.rank + number))
        dist.all_reduce(values)
        assert values[0] == 2 * number + 1
        dist.destroy_process_group()

    return test


for number in range(10):
    setattr(TestSum, f"test_sum_{number}", body(number))
