"""The operands that convolutions are measured with, and what is skipped of them."""

import itertools

import torch
import torch.nn.functional as F

import spamm_torch  # noqa: F401  loads the ops


class Case:
    """A layer's operands, the norms of their blocks and what is skipped under a threshold."""

    def __init__(self, layer, batch, dtype, data, block, device):
        self.layer, self.block = layer, block
        generator = torch.Generator(device).manual_seed(0)

        def randn(*shape):
            return torch.randn(shape, generator=generator, device=device)

        input = randn(batch, layer.in_channels, layer.size, layer.size).relu_()
        input *= self.scale(data, batch, generator, device)
        weight = randn(layer.out_channels, layer.in_channels, layer.kernel, layer.kernel)
        weight /= (layer.in_channels * layer.kernel**2) ** 0.5
        self.input = input.to(dtype).to(memory_format=torch.channels_last)
        self.weight = weight.to(dtype).to(memory_format=torch.channels_last)
        self.shape = {"stride": layer.stride, "padding": layer.padding}
        self.setting = {"block": block, "pixel_block": (block[2], 1, 1)}
        self.norm_weight = torch.ops.spamm_torch.conv2d_weight_norm(self.weight, **self.setting)
        self.norm_pixels, self.norm_columns = self.norms()

    def scale(self, data, batch, generator, device):
        """Sizes by place: "even" differs at random, "centred" falls off from the middle."""
        layer = self.layer
        if data == "even":
            shape = (-(-batch // 64), -(-layer.in_channels // 64), layer.size, layer.size)
            scale = torch.rand(shape, generator=generator, device=device) + 0.5
            blocks = scale.repeat_interleave(64, 0).repeat_interleave(64, 1)
            return blocks[:batch, : layer.in_channels]
        along = torch.linspace(-1, 1, layer.size, device=device)
        return torch.exp(-3 * (along[:, None].square() + along.square()).sqrt())

    def norms(self):
        """Of (image block, channel block, row, column), and of (K, pixel block): skip norms."""
        _, k, n = self.block
        images, channels, height, width = self.input.shape
        squares = F.pad(self.input.float().square(), (0, 0, 0, 0, 0, -channels % k, 0, -images % n))
        blocks = squares.view(-(-images // n), n, -(-channels // k), k, height, width).sum((1, 3))
        columns = F.unfold(blocks, self.layer.kernel, **self.shape)  # (channel block, position)
        columns = columns.view(len(blocks), blocks.shape[1], self.layer.kernel**2, -1)
        columns = columns.transpose(1, 2).flatten(1, 2).sqrt()
        columns[-1] *= (n / (images - (len(blocks) - 1) * n)) ** 0.5
        return blocks.sqrt(), columns.transpose(0, 1).flatten(1)

    def threshold(self, ratio):
        """A tau that keeps this share of the products in the picture, and the share it keeps."""
        inside = self.norm_columns > 0
        products = (self.norm_weight[0][:, :, None] * self.norm_columns)[:, inside]
        ordered = products.flatten().sort().values
        skipped = round((1 - ratio) * len(ordered))
        # Away from the product itself, for norms are right to a few last bits.
        tau = ordered[skipped] * (1 - 1e-5) if skipped else 0.0
        return tau, (ordered >= tau).double().mean().item()

    def error(self, output, tau):
        """Of one row of the picture in the first block of images, against float64."""
        layer, (m, k, n) = self.layer, self.block
        row = layer.output_size // 2
        images = min(n, len(self.input))
        padding = (layer.padding,) * 4
        padded = F.pad(self.input[:images], padding).double()
        columns = self.norm_columns.view(len(self.norm_columns), -1, *output.shape[2:])[:, 0, row]
        valid = ~(self.norm_weight[0][:, :, None] * columns < tau)
        expected = torch.zeros_like(output[:images, :, row], dtype=torch.float64)
        steps = itertools.product(
            range(layer.kernel), range(layer.kernel), range(0, layer.in_channels, k)
        )
        reach = (layer.output_size - 1) * layer.stride + 1
        for step, (y, x, c) in enumerate(steps):
            pixels = padded[:, c : c + k, row * layer.stride + y, x : x + reach : layer.stride]
            product = torch.einsum("oc,ncw->now", self.weight[:, c : c + k, y, x].double(), pixels)
            kept = valid[:, step].repeat_interleave(m, 0)[: layer.out_channels]
            expected += product * kept
        error = (output[:images, :, row].double() - expected).norm()
        return (error / expected.norm().clamp(min=1e-30)).item()
