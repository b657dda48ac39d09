"""What offload moves, without a device: host tensors are taken for a device's."""

import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ckpt import apply_partial_checkpoint
from lightning_ckpt.core.offload import OffloadConfig, read_offload, targets


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Make every tensor but parameters move, and list what moved."""
    tensors: list[Tensor] = []
    pack = targets._pack

    def recording_pack(tensor: Tensor) -> Any:
        packed = pack(tensor)
        if isinstance(packed, targets._Moved):
            tensors.append(packed.copy)
        return packed

    monkeypatch.setattr(targets, "nothing_to_move", lambda: False)
    monkeypatch.setattr(targets, "_is_on_host", lambda tensor: False)
    monkeypatch.setattr(targets, "_pack", recording_pack)
    return tensors


@dataclass
class Extra:
    scale: Tensor


def make_model() -> tuple[nn.Module, type[nn.Module]]:
    """A new block class each time: the exchanged class remembers where its inputs go."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.norm = nn.LayerNorm(8)
            self.second = nn.Linear(8, 8)

        def forward(self, x: Tensor, *, extra: dict[str, Any], mask: Tensor) -> Tensor:
            x = x * extra["deep"][0].scale
            return x + self.second(torch.tanh(self.linear(self.norm(x)))) * mask

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.ones(8)[None].expand(4, 8)
            for block in self.blocks:
                x = block(x, extra={"deep": [Extra(self.scale * 2)]}, mask=mask)
            return x.sum()

    torch.manual_seed(0)
    return Model(), Block


def gradients(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    model(torch.randn(4, 8)).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_keyword_and_nested_tensors_move_and_come_back(moved: list[Tensor]) -> None:
    model, _ = make_model()
    plain = gradients(model)
    with apply_partial_checkpoint(model, every_n=2, offload=True):
        assert all(map(torch.equal, gradients(model), plain))
    # Each of two blocks: x (4, 8), the scale in a dataclass in a list in a dict (8), and the mask,
    # which is an expanded row: 8 values and not 32.
    assert sorted(tensor.numel() for tensor in moved if tensor.numel()) == [8, 8, 8, 8, 32, 32]
    assert {block.offload for block in apply_partial_checkpoint(model, offload=True).plan} == {
        "host"
    }


def test_parameters_and_their_views_stay(moved: list[Tensor]) -> None:
    weight = nn.Parameter(torch.ones(4, 3))
    for tensor in (weight, weight.t(), weight[1:]):
        assert isinstance(targets._pack(tensor), targets._Stayed)
    assert moved == []


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        torch.arange(4.0)[None, :, None].expand(3, 4, 2),
        torch.arange(12.0)[2::3],
        torch.tensor(3.0),
        torch.empty(0, 3),
    ],
)
def test_values_shape_and_memory_format_come_back(moved: list[Tensor], tensor: Tensor) -> None:
    back = targets._unpack(targets._pack(tensor))
    assert torch.equal(back, tensor)
    assert back.shape == tensor.shape
    if tensor.is_contiguous(memory_format=torch.channels_last) and tensor.dim() == 4:
        assert back.stride() == tensor.stride()


def test_in_place_change_of_an_input_that_stayed_is_an_error() -> None:
    """Under saved-tensor hooks autograd does not look for itself."""
    tensor = torch.ones(3)
    packed = targets._pack(tensor)
    tensor.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        targets._unpack(packed)


def test_on_a_cpu_there_is_nothing_to_move_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator here")
    model, _ = make_model()
    plain = gradients(model)
    with apply_partial_checkpoint(model, offload=True):
        assert all(map(torch.equal, gradients(model), plain))
    assert caplog.text.count("nothing to move") == 1


@pytest.mark.parametrize("word", [True, "host", OffloadConfig()])
def test_words(word: Any) -> None:
    assert read_offload(word) == OffloadConfig("host")


def test_no_offload() -> None:
    assert read_offload(False) is None


def test_what_was_moved_is_let_go(moved: list[Tensor]) -> None:
    """After the forward nothing keeps the hidden states on the device but the last result."""
    model, _ = make_model()
    alive: list[weakref.ref[Tensor]] = []
    for block in model.blocks:
        block.register_forward_hook(lambda block, args, output: alive.append(weakref.ref(output)))
    with apply_partial_checkpoint(model, offload=True):
        loss = model(torch.randn(4, 8))
        assert [ref() is not None for ref in alive] == [False, False, False]
        loss.backward()
