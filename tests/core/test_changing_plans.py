"""A handle that does other things with the same blocks from one batch to the next."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import DIM, ROWS, MlpBlock, Stack, assert_same, batch, executions, seed_all
from torch import nn

from lightning_ckpt import OffloadConfig, apply_partial_checkpoint
from lightning_ckpt.core import swap
from lightning_ckpt.core.handle import Handle
from lightning_ckpt.core.plan import Action, Plan

NAMES = [f"layers.{index}" for index in range(4)]
ACTIONS: list[Action] = ["keep", "recompute", "recompute_saving", "recompute_saving_attention"]


def with_actions(handle: Handle, *actions: Action) -> Plan:
    blocks = zip(handle.plan, actions, strict=True)
    return replace(handle.plan, blocks=tuple(replace(b, action=a) for b, a in blocks), every_n=None)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    made = [parameter.grad for parameter in model.parameters()]
    assert all(grad is not None for grad in made)
    return [grad.clone() for grad in made if grad is not None]


@pytest.mark.parametrize("action", ACTIONS)
def test_blocks_do_what_the_new_plan_says(action: Action) -> None:
    seed_all(0)
    model = Stack(MlpBlock, 4)
    seed_all(1)
    model(batch(0)).pow(2).mean().backward()
    plain = gradients(model)
    with apply_partial_checkpoint(model) as handle:
        mixed = with_actions(handle, action, "keep", "recompute", action)
        handle.change(mixed)
        assert handle.plan is mixed
        model.zero_grad()
        seed_all(1)
        with executions(model, NAMES) as counts:
            model(batch(0)).pow(2).mean().backward()
        assert_same(gradients(model), plain)
        again = int(action != "keep")
        assert [counts[name] for name in NAMES] == [1 + again, 1, 2, 1 + again]
    assert all(type(layer) is MlpBlock for layer in model.layers)


@pytest.mark.parametrize("before", ACTIONS)
@pytest.mark.parametrize("after", ACTIONS)
def test_a_graph_made_before_stays_valid(before: Action, after: Action) -> None:
    seed_all(0)
    model = Stack(MlpBlock, 4)
    seed_all(1)
    model(batch(0)).pow(2).mean().backward()
    plain = gradients(model)
    model.zero_grad()
    with apply_partial_checkpoint(model) as handle:
        handle.change(with_actions(handle, *[before] * 4))
        seed_all(1)
        loss = model(batch(0)).pow(2).mean()
        handle.change(with_actions(handle, *[after] * 4))
        loss.backward()
    assert_same(gradients(model), plain)


def test_no_class_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the last block leaves it and comes back."""
    made = []
    subclass = swap._subclass
    monkeypatch.setattr(swap, "_subclass", lambda *key: made.append(key) or subclass(*key))
    model = Stack(MlpBlock, 4)
    with apply_partial_checkpoint(model) as handle:
        plans = [with_actions(handle, *[action] * 4) for action in ACTIONS]
        for plan in plans:
            handle.change(plan)
        num = len(made)
        for _ in range(3):
            for plan in plans:
                handle.change(plan)
                gc.collect()
        assert len(made) == num <= 3
        kept = set(handle._classes)
    assert not handle._classes
    assert kept


class Laid:
    """What FSDP2 lays over the class of each unit."""


def test_classes_that_others_laid_over_ours_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    new = swap._new_class
    monkeypatch.setattr(swap, "_new_class", lambda *given: made.append(given[1]) or new(*given))
    model = Stack(MlpBlock, 4)
    with apply_partial_checkpoint(model) as handle:
        laid = type("FSDPMlpBlock", (Laid, type(model.layers[0])), {})
        for layer in model.layers:
            layer.__class__ = laid
        plans = [with_actions(handle, *[action] * 4) for action in ACTIONS]
        for plan in plans:
            handle.change(plan)
        num = len(made)
        assert made.count("FSDPMlpBlock") <= 1 + len(ACTIONS), "one for all blocks"
        for _ in range(3):
            for plan in plans:
                handle.change(plan)
                gc.collect()
        assert len(made) == num
        assert all(isinstance(layer, Laid) for layer in model.layers)
    assert all(isinstance(layer, Laid) for layer in model.layers)
    assert not any(swap.is_swapped(layer) for layer in model.layers)


def test_only_the_own_entry_changes() -> None:
    """Where two plans are in force the newest rules, before and after."""
    model = Stack(MlpBlock, 4)
    with apply_partial_checkpoint(model) as older:
        newer = apply_partial_checkpoint(model, every_n=2)
        older.change(with_actions(older, *["keep"] * 4))
        assert [swap.is_swapped(layer) for layer in model.layers] == [True, False, True, False]
        newer.remove()
        assert not any(swap.is_swapped(layer) for layer in model.layers)
        older.change(with_actions(older, *["recompute"] * 4))
        assert all(swap.is_swapped(layer) for layer in model.layers)


def test_plans_that_do_not_fit_are_refused() -> None:
    model, other = Stack(MlpBlock, 4), Stack(MlpBlock, 3)
    with apply_partial_checkpoint(model) as handle, apply_partial_checkpoint(other) as of_other:
        with pytest.raises(ValueError, match="other blocks"):
            handle.change(of_other.plan)
        offloaded = [replace(block, offload="disk") for block in handle.plan]
        with pytest.raises(ValueError, match="offloads to disk"):
            handle.change(replace(handle.plan, blocks=tuple(offloaded)))
        assert handle.plan.num_recomputed == 4


def test_offload_follows_too(tmp_path: Path) -> None:
    model = Stack(MlpBlock, 4)
    config = OffloadConfig(target="disk", directory=str(tmp_path), min_bytes=1, keep_last=0)
    with apply_partial_checkpoint(model, offload=config) as handle:
        moved = []
        first = handle.plan
        kept = replace(first, blocks=tuple(replace(b, offload=None) for b in first))
        for plan in (first, kept, first):
            handle.change(plan)
            before = handle.offloaded_bytes
            model(torch.randn(ROWS, DIM)).pow(2).mean().backward()
            moved.append(handle.offloaded_bytes - before)
        assert moved[1] == 0 < moved[0] == moved[2]


@pytest.mark.parametrize("num", [12, 100])
def test_a_switch_costs_microseconds(num: int) -> None:
    model = Stack(MlpBlock, num)
    with apply_partial_checkpoint(model) as handle:
        plans = [with_actions(handle, *[action] * num) for action in ("keep", "recompute")]
        for plan in plans:
            handle.change(plan)
        taken = []
        for _ in range(10):
            begin = time.process_time()
            for plan in plans * 5:
                handle.change(plan)
            taken.append((time.process_time() - begin) / 10)
    assert min(taken) < 20e-6 * num
