"""What the report of a step says of its peak."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_ckpt import OffloadConfig, apply_partial_checkpoint
from lightning_ckpt.core.offload import OffloadReport, watch_first_step
from lightning_ckpt.core.offload.report import PeakMoment

MIB = 2**20
LOSS, BACKWARD = "the rest of the forward and the loss", "the backward of block 1 of 8"


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, hidden), nn.Linear(hidden, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Model(nn.Module):
    def __init__(self, hidden: int, num_words: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(hidden) for _ in range(4))
        self.head = nn.Linear(32, num_words)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).log_softmax(-1).mean()


def said(tmp_path: Path, hidden: int, num_words: int) -> str:
    """The last sentence after a step."""
    model, x = Model(hidden, num_words), torch.ones(256, 32)
    offload = OffloadConfig("disk", directory=str(tmp_path), min_bytes=0)
    with apply_partial_checkpoint(model, offload=offload) as handle:
        assert handle.offloader is not None
        end = watch_first_step(handle.offloader, torch.device("cpu"), model, x)
        model(x).backward()
        return end().sentences()[-1]


def test_logits_that_are_most_of_the_peak(tmp_path: Path) -> None:
    text = said(tmp_path, hidden=32, num_words=4096)
    assert f"came in {LOSS}" in text
    assert "the logits and the loss dominate the peak, and offload cannot lower it further" in text
    assert "fewer logits at once" in text


def test_a_recompute_that_is_most_of_the_peak(tmp_path: Path) -> None:
    text = said(tmp_path, hidden=4096, num_words=2)
    assert "came in the backward of block" in text
    assert "one block's recompute, beside parameters and gradients, dominates the peak" in text
    assert "logits" not in text


@pytest.mark.parametrize(
    ("moment", "words"),
    [
        (PeakMoment(LOSS, 100 * MIB, 40 * MIB), {"higher"}),
        (PeakMoment(LOSS, 1000 * MIB, 40 * MIB), {"higher", "logits"}),
        (PeakMoment(LOSS, 100 * MIB, 10 * MIB), {"logits"}),
        (PeakMoment(BACKWARD, 100 * MIB, 40 * MIB), {"higher"}),
        (PeakMoment(BACKWARD, 1000 * MIB, 40 * MIB), {"higher", "recompute"}),
        (PeakMoment(BACKWARD, 100 * MIB, 0), {"recompute"}),
        (PeakMoment("the forward", 100 * MIB, 0), {"what runs there"}),
    ],
    ids=str,
)
def test_the_peak_in_a_sentence(moment: PeakMoment, words: set[str]) -> None:
    report = OffloadReport("disk", out_bytes=1, asked_bytes=40 * MIB, peak=moment)
    text = report.sentences()[-1]
    assert f"{moment.peak_bytes / MIB:.1f} MiB, came in {moment.phase}" in text
    assert f"{moment.away_bytes / MIB:.1f} MiB of at most 40.0 MiB were elsewhere" in text
    all_words = ("higher", "logits", "recompute", "what runs there")
    assert {word for word in all_words if word in text} == words
    assert ("cannot lower it further" in text) == (words != {"higher"})
