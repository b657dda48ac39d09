"""Situations that people reported, of which no other file has a test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import DIM, MlpBlock, Stack, assert_same, batch, compare, executions, learn
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from lightning_ckpt import apply_partial_checkpoint


class Experts(nn.Module):
    """A mixture of experts whose router says the same of every expert: all are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        nn.init.zeros_(self.router.weight)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        parts = [
            (weights * (chosen == index)).sum(-1, keepdim=True) * expert(x).tanh()
            for index, expert in enumerate(self.experts)
            if bool((chosen == index).any())
        ]
        return x + torch.stack(parts).sum(0)


@pytest.mark.parametrize("autocast", [False, True])
def test_experts_that_are_tied(autocast: bool) -> None:
    """Pitfall 6, report E5: the recompute chooses the same ones, or torch would see other sizes."""

    def step(model: nn.Module, index: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(batch(index)).float().pow(2).mean()
        loss.backward()
        return loss.detach()

    compare(lambda: Stack(Experts, 3), step)


class SharedKeys(nn.Module):
    """The first two write keys and values into the dict that all are given, after they have read
    what stood there; all attend to them."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.query = nn.Linear(DIM, DIM)
        self.keys = nn.Linear(DIM, 2 * DIM)

    def forward(self, x: Tensor, *, shared: dict[str, Tensor]) -> Tensor:
        if self.index < 2:
            x = x + shared.get("k", 0.5)
            shared["k"], shared["v"] = self.keys(x).chunk(2, dim=-1)
        query = self.query(x)
        return x + nn.functional.scaled_dot_product_attention(query, shared["k"], shared["v"])


@pytest.mark.parametrize("every_n", [1, 2])
def test_keys_that_layers_share(every_n: int) -> None:
    """Pitfall 8: gradients of the shared keys, which flow through a dict from layer to layer."""

    class Sharing(Stack):
        def __init__(self) -> None:
            super().__init__(num_blocks=0)
            self.layers = nn.ModuleList(SharedKeys(index) for index in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x, shared = self.stem(x), {}
            for layer in self.layers:
                x = layer(x, shared=shared)
            return self.head(x)

    compare(Sharing, every_n=every_n)


@pytest.mark.parametrize("training", [True, False])
def test_keys_that_layers_of_transformers_share(training: bool) -> None:
    """Report G3: as in plain; where keys go through the cache (up to 4.57), refused with the way
    out. (Those make a cache in eval mode only.)"""
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma3nTextConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=64,
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=4,
        num_kv_shared_layers=2,
        laurel_rank=2,
        altup_num_inputs=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=4,
        activation_sparsity_pattern=[0.0] * 4,
    )

    def step(model: nn.Module, index: int, **settings: bool) -> Tensor:
        ids = (torch.arange(10).reshape(2, 5) * 7 + index) % 60 + 3
        loss = model.train(training)(input_ids=ids, labels=ids, **settings).loss
        loss.backward()
        return loss.detach()

    def model() -> nn.Module:
        return transformers.Gemma3nForCausalLM(config)

    compare(model, lambda model, index: step(model, index, use_cache=False), steps=2)
    if training or not transformers.__version__.startswith("4."):
        compare(model, step, steps=2)
    else:
        with pytest.raises(ValueError, match=r"another layer from the cache.*use_cache=False"):
            compare(model, step, steps=2)


@pytest.fixture
def shard(gloo: None) -> Callable[[Stack, bool], None]:
    """FSDP2 with a unit for each block, and if wanted for the layers inside of them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))

    def shard(model: Stack, inside: bool) -> None:
        for layer in model.layers:
            for part in (layer.up, layer.down) if inside else ():
                fully_shard(part, mesh=mesh)
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    return shard


class Looped(Stack):
    """Each block is used twice in a forward, and once more with other rows."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in (*self.layers, *self.layers):
            x = layer(x)
        crop = self.stem(batch(7, rows=2))
        for layer in self.layers:
            crop = layer(crop)
        return self.head(torch.cat([x, crop]))


# Torch 2.8 raises there, with a checkpoint written by hand as well.
_INSIDE = pytest.param(
    True, marks=pytest.mark.skipif(torch.__version__ < "2.13", reason="needs torch 2.13")
)


@pytest.mark.parametrize("inside", [False, _INSIDE])
@pytest.mark.parametrize("frozen", [False, True])
def test_sharded_blocks_that_are_used_twice(
    inside: bool, frozen: bool, shard: Callable[[Stack, bool], None]
) -> None:
    """Pitfalls 21, 22, 23: also with units inside of the recomputed blocks, whose hooks run again,
    and with frozen blocks; parameters are sharded again afterwards."""
    from torch.distributed.tensor import DTensor

    def run(checkpointed: bool) -> tuple[list[Tensor | None], Counter[str]]:
        torch.manual_seed(0)
        model = Looped(MlpBlock, 3)
        model.layers[1].requires_grad_(not frozen)
        if checkpointed:
            apply_partial_checkpoint(model)
        shard(model, inside)
        torch.manual_seed(1)
        with executions(model, ["layers.0", "layers.1"]) as counts:
            grads: list[Any] = learn(model, batch(0))
        assert all(isinstance(parameter, DTensor) for parameter in model.layers.parameters())
        return [None if grad is None else grad.full_tensor() for grad in grads], counts

    (ours, counts), (plain, once) = run(True), run(False)
    assert_same(ours, plain)
    assert counts == {name: 2 * times for name, times in once.items()}


@pytest.mark.parametrize("early", [True, False])
def test_hooks_inside_a_block_that_come_in_pairs(early: bool) -> None:
    """Pitfall 25: the recompute ends in the middle of a layer, whose hook after forward then runs
    only if it asked for `always_call`; without the early end every hook runs."""
    model = Stack(MlpBlock, 2)
    calls: Counter[str] = Counter()
    for layer in model.layers:
        layer.down.register_forward_pre_hook(lambda *_: calls.update(["before"]))
        layer.down.register_forward_hook(lambda *_: calls.update(["after"]))
        layer.down.register_forward_hook(lambda *_: calls.update(["always"]), always_call=True)
    with apply_partial_checkpoint(model), set_checkpoint_early_stop(early):
        learn(model, batch(0))
    assert calls == {"before": 4, "after": 2 if early else 4, "always": 4}
