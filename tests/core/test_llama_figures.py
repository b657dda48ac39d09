"""Bytes on the Llama shape whose figures are known for plain training and each interval.

12 layers, width 256, 8 x 256 tokens, float32: peak of live tensor bytes over one forward and
backward with parameters counted in, gradients None at the start, no optimizer.
"""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from lightning_ckpt import apply_partial_checkpoint, find_blocks
from lightning_ckpt.core.memory import track_peak

transformers = pytest.importorskip("transformers", minversion="5")  # 4 makes a mask besides

MIB = 2**20
BATCH, LENGTH, WIDTH, LAYERS = 8, 256, 256, 12


@pytest.fixture(scope="module")
def model() -> Iterator[nn.Module]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=691,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=512,
        max_position_embeddings=1024,
    )
    yield transformers.LlamaForCausalLM(config)
    gc.collect()


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(512, (BATCH, LENGTH))


def measure(model: nn.Module, tokens: torch.Tensor) -> tuple[float, int]:
    """Peak in MiB, and bytes held between forward and backward beyond what was there before."""
    model.zero_grad(set_to_none=True)
    with track_peak(model, tokens) as tracker:
        before = tracker.current_bytes
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        held = tracker.current_bytes - before
        loss.backward()
    return tracker.peak_bytes / MIB, held


def block_activations(model: nn.Module) -> int:
    """Bytes that one layer holds for backward, beyond its input and its output."""
    layer = find_blocks(model)[0].module
    hidden = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    positions = torch.arange(LENGTH)[None]
    rotary = model.model.rotary_emb(hidden, positions)
    with track_peak(layer, [hidden, rotary]) as tracker:
        before = tracker.current_bytes
        output = layer(hidden, position_embeddings=rotary, attention_mask=None)
        held = tracker.current_bytes - before - output.nbytes
    return held


@pytest.fixture(scope="module")
def plain(model: nn.Module, tokens: torch.Tensor) -> tuple[float, int]:
    return measure(model, tokens)


def test_plain_peak(plain: tuple[float, int]) -> None:
    assert plain[0] == pytest.approx(555.5, rel=0.01)


@pytest.mark.parametrize(("every_n", "peak"), [(1, 126.3), (2, 317.4), (4, 436.4)])
def test_peak_and_bytes_held(
    model: nn.Module, tokens: torch.Tensor, plain: tuple[float, int], every_n: int, peak: float
) -> None:
    with apply_partial_checkpoint(model, every_n=every_n) as handle:
        num_recomputed = handle.plan.num_recomputed
        measured, held = measure(model, tokens)
    assert measured == pytest.approx(peak, rel=0.01)
    # A kept block holds its activations. A checkpointed one holds its inputs: the hidden states,
    # which are the output of the block before and held anyway, and once for all blocks the
    # position ids, which no operation of a layer saves.
    position_ids = LENGTH * 8
    assert plain[1] - held == num_recomputed * block_activations(model) - position_ids
    assert held >= LAYERS * BATCH * LENGTH * WIDTH * 4
