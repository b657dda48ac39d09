"""Tensors without values, but for whole numbers, which decide what a model computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import seed_all
from torch import Tensor, nn

from lightning_ckpt import estimate
from lightning_ckpt.core import fake
from lightning_ckpt.core._torch import is_fake
from lightning_ckpt.core.fake import fake_batch, fake_module, without_values
from lightning_ckpt.core.memory import track_peak


def step_peak(model: nn.Module, batch: Any) -> int:
    with track_peak(model, batch) as tracker:
        model(*batch).backward()
    return tracker.peak_bytes


class Masked(nn.Module):
    """Makes a mask, of the size of the scores, only where something is hidden; as models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, tokens: Tensor, seen: Tensor) -> Tensor:  # (B, T), (B, T)
        x = self.embed(tokens)
        mask = None
        if not seen.bool().all():
            mask = torch.zeros(*tokens.shape, tokens.shape[1]).masked_fill(
                ~seen.bool()[:, None], -9
            )
        for layer in self.layers:
            x = layer(x)
            scores = x @ x.transpose(1, 2)
            scores = scores if mask is None else scores + mask
            x = scores.softmax(-1) @ x
        return x.pow(2).mean()


@pytest.mark.parametrize("hidden", [0, 3])
@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.int32])
def test_a_model_may_ask_what_its_batch_says(hidden: int, dtype: torch.dtype) -> None:
    seed_all(0)
    tokens, seen = torch.randint(32, (4, 64)), torch.ones(4, 64, dtype=dtype)
    seen[0, :hidden] = 0
    found = estimate(Masked(), (tokens, seen), layers=nn.Linear)
    assert found.every_n[0].peak == pytest.approx(step_peak(Masked(), (tokens, seen)), rel=0.005)


@pytest.mark.parametrize("padded", [False, True])
def test_transformers_makes_the_masks_of_a_real_step(padded: bool) -> None:
    hf = pytest.importorskip("transformers")
    seed_all(0)
    config = hf.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=64, use_cache=False,
    )  # fmt: skip
    tokens = torch.randint(64, (2, 96))
    batch = {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}
    batch["attention_mask"][0, :5] = 0 if padded else 1
    model = hf.LlamaForCausalLM(config).train()
    found = estimate(model, batch)
    with track_peak(model, batch) as tracker:
        model(**batch).loss.backward()
    assert found.every_n[0].peak == pytest.approx(tracker.peak_bytes, rel=0.02)


def test_which_tensors_have_values() -> None:
    given = {"whole": torch.arange(3), "real": torch.ones(3), "meta": _meta()}
    with without_values():
        batch = fake_batch(given)
        assert batch["whole"].tolist() == [0, 1, 2]
        assert (torch.arange(4) > 1).tolist() == [False, False, True, True]
        assert int((batch["whole"] > 0).sum()) == 2
        assert torch.nonzero(batch["whole"]).shape == (2, 1)
        for without in (batch["real"], batch["meta"], batch["real"] * batch["whole"]):
            assert is_fake(without)
        assert is_fake(torch.zeros(3))
        assert is_fake(torch.randint(9, (3,))), "it would take from the user's random numbers"
    assert not is_fake(torch.zeros(3))


def _meta() -> Tensor:
    return torch.ones(3, dtype=torch.long, device="meta")


def test_the_batch_is_copied() -> None:
    given = torch.arange(3)
    with without_values():
        fake_batch([given])[0].add_(1)
    assert given.tolist() == [0, 1, 2]


def test_what_is_large_has_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "_MOST_BYTES", 99)
    with without_values():
        whole = fake_batch(torch.arange(10))
        assert not is_fake(whole > 3)
        assert is_fake(whole[:, None] > whole)
        assert not is_fake(whole.expand(100, 10)), "a view takes nothing"


def test_a_copy_of_a_module_has_no_values_and_keeps_its_ties() -> None:
    model = Masked()
    model.layers[1].weight = model.layers[0].weight
    model.register_buffer("places", torch.arange(3))
    with without_values():
        copied = fake_module(model)
        assert copied.places.add_(1).tolist() == [1, 2, 3]
    assert model.places.tolist() == [0, 1, 2]
    assert all(map(is_fake, copied.parameters()))
    assert copied.layers[1].weight is copied.layers[0].weight
    assert not any(map(is_fake, model.parameters()))


GROUPED = {
    "rows by experts": ((6, 8), (2, 8, 16)),
    "experts by columns": ((2, 6, 8), (8, 16)),
    "both in groups": ((2, 6, 8), (2, 8, 16)),
    "both flat": ((6, 8), (8, 16)),
}


@pytest.mark.parametrize("kind", GROUPED)
def test_products_in_groups_have_the_shape_of_real_ones(kind: str) -> None:
    if not hasattr(torch, "_grouped_mm"):
        pytest.skip("this torch has none")
    ends = {"rows by experts": [2, 6], "experts by columns": [4, 16], "both flat": [4, 8]}.get(kind)
    offs = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    a, b = (torch.randn(shape) for shape in GROUPED[kind])
    try:
        real = torch._grouped_mm(a, b, offs=offs)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"this torch computes none of it on a CPU: {error}")
    with without_values():
        made = torch._grouped_mm(fake_batch(a), fake_batch(b), offs=offs)
    assert is_fake(made)
    assert (made.shape, made.dtype) == (real.shape, real.dtype)
