"""What only a device can show."""

import pytest
import torch
from torch import Tensor, nn

from lightning_ckpt import apply_partial_checkpoint
from lightning_ckpt.core.memory import track_peak
from lightning_ckpt.core.verify import verify

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDTH, BLOCKS = 256, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (B, D)
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        return x + nn.functional.dropout(self.down(hidden), 0.1)


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS))).cuda()


def run(model: nn.Module, dtype: torch.dtype | None = None) -> tuple[list[Tensor], int, int]:
    """Gradients, peak bytes, and bytes held between forward and backward."""
    model.zero_grad()
    torch.manual_seed(1)
    x = torch.randn(4096, WIDTH, device="cuda")
    with track_peak(model, device="cuda") as tracker:
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
            before = tracker.current_bytes
            loss = model(x).float().pow(2).mean()
            held = tracker.current_bytes - before
        loss.backward()
    torch.cuda.synchronize()
    return [parameter.grad.clone() for parameter in model.parameters()], tracker.peak_bytes, held


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("offload", [False, True, "disk"])
def test_same_gradients_in_less_memory(dtype: torch.dtype | None, offload: bool | str) -> None:
    model = stack()
    plain, plain_peak, _ = run(model, dtype)
    with apply_partial_checkpoint(model, offload=offload):
        ours, peak, _ = run(model, dtype)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert peak < plain_peak


@pytest.mark.parametrize("target", ["host", "disk"])
def test_offload_takes_the_inputs_off_the_device(target: str) -> None:
    model = stack()
    with apply_partial_checkpoint(model):
        _, _, held = run(model)
    with apply_partial_checkpoint(model, offload=target):
        _, _, held_offloaded = run(model)
    # The input of the first block is the batch, which the caller holds.
    assert held - held_offloaded >= (BLOCKS - 1) * 4096 * WIDTH * 4


def test_verify_on_the_device() -> None:
    """Dropout draws from the device's generator, which is put back as well."""
    model, batch = stack(), torch.randn(4096, WIDTH, device="cuda")
    before = torch.cuda.get_rng_state()
    report = verify(model, batch)
    assert report.ok, report.differences
    assert list(report.recomputes.values()) == [1] * BLOCKS
    assert report.plain_peak_bytes is not None
    assert report.checkpointed_peak_bytes is not None
    assert report.checkpointed_peak_bytes < report.plain_peak_bytes
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert report.compared["generator"] == 1
