"""Max pools in generated forwards: torch's values, and torch's own module where anything is odd."""

import pytest
import torch
from small_models import is_served, pictures, resnet, trained
from torch import nn

from spamm_torch import convert_

POOLS = {
    "plain": nn.MaxPool2d(2),
    "overlapping": nn.MaxPool2d(3, 2, 1),
    "uneven": nn.MaxPool2d((3, 2), (1, 2), (1, 0), ceil_mode=True),
    "dilated": nn.MaxPool2d(2, 1, 0, 2),
}


def with_pool(pool):
    return trained(nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), pool))


@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS.keys())
@pytest.mark.parametrize("images", [3, 40])
def test_pools_give_the_values_of_torch(device, pool, images):
    dtype, most = (torch.float16, 5e-3) if device.type == "cuda" else (torch.float32, 1e-5)
    model = with_pool(pool).to(device, dtype).to(memory_format=torch.channels_last)
    torch.manual_seed(0)
    input = torch.randn(images, 16, 11, 10, device=device).to(dtype)
    input = input.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        convert_(model)
        assert is_served(model, input)
        torch.testing.assert_close(model(input), pool(model[:2](input)), rtol=most, atol=most)


def test_a_pool_with_a_hook_is_called():
    model, seen = trained(resnet()), []
    with torch.no_grad():
        convert_(model)
        before = model(pictures())
        model.pool.register_forward_hook(lambda *_: seen.append("pool"))
        torch.testing.assert_close(model(pictures()), before)
    assert seen == ["pool"]


def test_pools_that_return_indices_stay():
    class Unpooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3, padding=1)
            self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

        def forward(self, x):
            return self.unpool(*self.pool(self.conv(x).relu()))

    model, input = trained(Unpooled()), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        expected = model(input)
        convert_(model)
        torch.testing.assert_close(model(input), expected)
