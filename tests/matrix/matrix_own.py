"""Models written by hand: torch's own layers, and the shapes of network that people write."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from matrix_rows import Row
from matrix_sizes import Batch, noise
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 16
KIND = "Written by hand"


def rows_of(length: int = 32) -> Batch:
    return {"x": noise(8, length, WIDTH)}


def images(channels: int = 3) -> Batch:
    return {"x": noise(4, channels, 32, 32)}


# --- torch's own layers


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Transformer(WIDTH, 4, 3, 3, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x, x.flip(1), tgt_is_causal=False)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True, norm_first=True)
        self.net = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
        return self.net(x, mask=mask, is_causal=True)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 4, 32), 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return self.net(x, memory=x.flip(0))


class RecurrentBlock(nn.Module):
    def __init__(self, layer: type[nn.RNNBase]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.recurrent = layer(WIDTH, WIDTH, 2, batch_first=True, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.recurrent(self.norm(x))[0]


class Recurrent(nn.Module):
    """A stack of recurrent layers."""

    def __init__(self, layer: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(RecurrentBlock(layer) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


# --- vision


class ConvBlock(nn.Sequential):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(
            nn.Conv2d(inside, outside, 3, padding=1),
            nn.BatchNorm2d(outside),
            nn.ReLU(inplace=True),
            nn.Conv2d(outside, outside, 3, padding=1),
            nn.BatchNorm2d(outside),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """Blocks on the way down and up, joined by skips."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [3, 8, 12, 16]
        self.down = nn.ModuleList(ConvBlock(a, b) for a, b in itertools.pairwise(sizes))
        self.middle = ConvBlock(16, 16)
        self.up = nn.ModuleList(ConvBlock(a + a, b) for a, b in ((16, 12), (12, 8), (8, 8)))
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, skips.pop()], 1))
        return self.head(x)


class DenseLayer(nn.Module):
    def __init__(self, inside: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inside)
        self.conv = nn.Conv2d(inside, 4, 3, padding=1)
        self.mix = nn.Conv2d(4, 4, 1)

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.mix(self.conv(F.relu(self.norm(torch.cat(features, 1)))))


class DenseNet(nn.Module):
    """Each layer sees a list of all results before, and the model appends to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(3 + 4 * index) for index in range(5))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


class MixerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.places = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
        self.channels = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm(x))


# --- several networks, or one in several places


class ResidualBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 64)
        self.dropout = nn.Dropout(0.1)
        self.down = nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(F.gelu(self.up(self.norm(x)))))


class Tower(nn.Module):
    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlock() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Siamese(nn.Module):
    """One tower, called for both views before one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.head(self.tower(x)), self.head(self.tower(x.flip(1)[:6]))
        return (one.mean((0, 1)) - other.mean((0, 1))).pow(2).sum()


class Shared(nn.Module):
    """One block, six times, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([ResidualBlock()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for _ in range(6):
            x = self.layers[0](x)
        return x


class Gan(nn.Module):
    """Two nets in one module; `gan_step` trains them in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = Tower()
        self.critic = nn.Sequential(Tower(), nn.Linear(WIDTH, 1))


def gan_step(model: nn.Module, index: int) -> Any:
    """A critic's step on detached fakes with a gradient penalty, and a generator's step."""
    assert isinstance(model, Gan)
    real, seed = noise(8, 32, WIDTH), noise(8, 32, WIDTH).flip(0)
    fake = model.generator(seed)
    between = (0.3 * real + 0.7 * fake.detach()).requires_grad_(True)
    (slope,) = torch.autograd.grad(model.critic(between).sum(), between, create_graph=True)
    penalty = (slope.flatten(1).norm(dim=1) - 1).pow(2).mean()
    loss = model.critic(fake.detach()).mean() - model.critic(real).mean() + penalty
    loss.backward()
    for parameter in model.critic.parameters():
        parameter.requires_grad_(False)
    cost = -model.critic(fake).mean()
    cost.backward()
    for parameter in model.critic.parameters():
        parameter.requires_grad_(True)
    return loss.detach(), cost.detach()


# --- state that moves in forward


class Quantizer(nn.Module):
    """Nearest codes; the codebook follows what it sees, and codes that nobody uses start anew."""

    def __init__(self, num_codes: int = 8) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("codes", torch.randn(num_codes, WIDTH))
        self.register_buffer("counts", torch.ones(num_codes))
        self.register_buffer("sums", torch.randn(num_codes, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.proj(x))
        flat = y.reshape(-1, WIDTH)
        chosen = torch.cdist(flat, self.codes).argmin(1)  # type: ignore[arg-type]
        quantized = self.codes[chosen].view_as(y)  # type: ignore[index]
        if self.training:
            self._follow(flat.detach(), chosen)
        return x + y + (quantized - y).detach()

    @torch.no_grad()
    def _follow(self, flat: Tensor, chosen: Tensor) -> None:
        used = F.one_hot(chosen, len(self.codes)).to(flat.dtype)  # type: ignore[arg-type]
        self.counts.mul_(0.9).add_(used.sum(0), alpha=0.1)  # type: ignore[operator, union-attr]
        self.sums.mul_(0.9).add_(used.T @ flat, alpha=0.1)  # type: ignore[operator, union-attr]
        dead = self.counts < 0.5  # type: ignore[operator]
        if dead.any():
            fresh = flat[torch.randint(len(flat), (int(dead.sum()),))]
            self.sums[dead] = fresh  # type: ignore[index, operator]
            self.counts[dead] = 1.0  # type: ignore[index, operator]
        self.codes = self.sums / self.counts.unsqueeze(1)  # type: ignore[operator]


class VqVae(nn.Module):
    """Residual quantizers as blocks, so the codebooks move inside them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.quantizers = nn.ModuleList(Quantizer() for _ in range(3))
        self.decoder = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.encoder(x)
        for quantizer in self.quantizers:
            y = quantizer(y)
        return (self.decoder(y) - x).pow(2).mean()


class ExpertBlock(nn.Module):
    """Noisy top-1 routing with a counter of loads that biases the router, and a balance loss."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
            for _ in range(num_experts)
        )
        self.register_buffer("loads", torch.zeros(num_experts))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = self.norm(x).reshape(-1, WIDTH)
        scores = self.router(flat) - 0.1 * self.loads  # type: ignore[operator]
        weights = (scores + torch.randn_like(scores) * 0.1).softmax(-1)
        best, chosen = weights.max(-1)
        result = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            places = (chosen == index).nonzero().squeeze(1)
            if len(places):
                result = result.index_add(
                    0, places, expert(flat[places]) * best[places].unsqueeze(1)
                )
        used = F.one_hot(chosen, len(self.experts)).float().mean(0)
        self.loads += used  # type: ignore[assignment, operator]
        self.steps.add_(1)  # type: ignore[operator, union-attr]
        return x + result.view_as(x), (used * weights.mean(0)).sum()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ExpertBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        balance = torch.zeros(())
        for layer in self.layers:
            x, cost = layer(x)
            balance = balance + cost
        return x.pow(2).mean() + 0.01 * balance


def mixer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(MixerBlock() for _ in range(4)))


OWN = [
    Row(
        "nn.Transformer",
        "TransformerEncoderLayer: 3 net.encoder.layers.*; "
        "TransformerDecoderLayer: 3 net.decoder.layers.*",
        Transformer,
        rows_of,
        KIND,
    ),
    Row("nn.TransformerEncoder", "TransformerEncoderLayer: 4 net.layers.*", Encoder, rows_of, KIND),
    Row("nn.TransformerDecoder", "TransformerDecoderLayer: 4 net.layers.*", Decoder, rows_of, KIND),
    Row("nn.LSTM stack", "RecurrentBlock: 4 layers.*", lambda: Recurrent(nn.LSTM), rows_of, KIND),
    Row("nn.GRU stack", "RecurrentBlock: 4 layers.*", lambda: Recurrent(nn.GRU), rows_of, KIND),
    Row("nn.RNN stack", "RecurrentBlock: 4 layers.*", lambda: Recurrent(nn.RNN), rows_of, KIND),
    Row("U-Net", "ConvBlock: 3 down.*, 3 up.*", UNet, images, KIND),
    Row("DenseNet", "DenseLayer: 5 layers.*", DenseNet, images, KIND),
    Row("MLP-Mixer", "MixerBlock: 4 *", mixer, lambda: {"input": noise(8, 32, WIDTH)}, KIND),
    Row("siamese", "ResidualBlock: 4 tower.blocks.*", Siamese, rows_of, KIND),
    Row("shared block, six times", "ResidualBlock: 1 layers.*", Shared, rows_of, KIND),
    Row(
        "GAN",
        "ResidualBlock: 4 generator.blocks.*, 4 critic.*.blocks.*",
        Gan,
        dict,
        KIND,
        ratio=None,
        note="with a gradient penalty: critic blocks run once more for the second derivative",
        step=gan_step,
    ),
    Row("VQ-VAE", "Quantizer: 3 quantizers.*", VqVae, rows_of, KIND),
    Row("mixture of experts", "ExpertBlock: 3 layers.*", Experts, rows_of, KIND),
]
