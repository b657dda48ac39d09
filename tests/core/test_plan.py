"""Plans as data, from files, and in force: gradients, state, recomputes and bytes of any plan."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers import DIM, MlpBlock, Stack, assert_same, batch, compare, seed_all, square_step
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from lightning_ckpt import BlockPlan, Plan, apply_partial_checkpoint
from lightning_ckpt.core import saving
from lightning_ckpt.core._torch import TorchDispatchMode
from lightning_ckpt.core.memory import track_peak
from lightning_ckpt.core.plan import read_plan, write_plan

ACTIONS = ["keep", "recompute", "recompute_saving", "recompute_saving_attention"]
aten = torch.ops.aten


class AttentionBlock(nn.Module):
    """Attention, dropout and an MLP; the head count is one."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.mlp = MlpBlock(dim)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        q, k, v = (part[:, None] for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        return self.mlp(x + scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


def attention_step(model: nn.Module, index: int) -> Tensor:
    loss = model(batch(index, rows=12).view(3, 4, DIM)).pow(2).mean()
    loss.backward()
    return loss.detach()


def plan_of(*actions: str) -> dict[str, Any]:
    return {"blocks": [{"name": f"layers.{i}", "action": a} for i, a in enumerate(actions)]}


# --- data


def test_a_plan_survives_a_dict_and_a_file(tmp_path: Path) -> None:
    plan = Plan(
        (BlockPlan("a.0", "A", "keep"), BlockPlan("a.1", "A", "recompute_saving", "host")),
        notes=("said",),
    )
    assert Plan.from_dict(plan.to_dict()) == plan
    for name in ("plan.yaml", "plan.json"):
        write_plan(plan, tmp_path / name)
        assert read_plan(str(tmp_path / name)) == plan
        assert read_plan(tmp_path / name) == plan
    json.loads((tmp_path / "plan.json").read_text())
    assert yaml.safe_load((tmp_path / "plan.yaml").read_text())["every_n"] is None


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({}, "list of blocks"),
        ([], "list of blocks"),
        ({"blocks": []}, "no blocks"),
        ({"blocks": [{"action": "keep"}]}, "at least a name"),
        ({"blocks": [{"name": "a", "action": "drop"}]}, "action='drop' of block 'a'"),
        ({"blocks": [{"name": "a"}]}, "action=None of block 'a'"),
        ({"blocks": [{"name": "a", "action": "keep", "offload": "gpu"}]}, "offload='gpu'"),
        ({"blocks": [{"name": "a", "action": "keep", "ofload": "host"}]}, "'ofload'"),
        ({"blocks": [{"name": "a", "action": "keep"}], "every": 2}, "'every'"),
        ({"blocks": [{"name": "a", "action": "keep"}], "every_n": 0}, "every_n"),
        ({"blocks": [{"name": "a", "action": "keep"}] * 2}, "'a' twice"),
        (
            {
                "blocks": [
                    {"name": f"layers.{i}", "action": "recompute", "offload": place}
                    for i, place in enumerate(["host", "disk"])
                ]
            },
            "disk and host",
        ),
    ],
)
def test_bad_plans(data: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        Plan.from_dict(data)
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises((TypeError, ValueError), match=says) as caught:
        read_plan(path)
    assert "plan.yaml" in str(caught.value), "the file is named"


@pytest.mark.parametrize(
    ("plan", "error", "says"),
    [
        (3, TypeError, "got 3"),
        ("no/such/plan.yaml", ValueError, "no/such/plan.yaml"),
        (Plan((BlockPlan("a", "A", "drop"),)), ValueError, "drop"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_plan(plan: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        read_plan(plan)


def test_a_file_that_is_no_yaml(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("blocks: [")
    with pytest.raises(ValueError, match="neither YAML nor JSON"):
        read_plan(tmp_path / "plan.yaml")


# --- in force


@pytest.mark.parametrize("actions", list(itertools.product(ACTIONS, repeat=2)))
def test_any_plan_trains_as_plain(actions: tuple[str, ...]) -> None:
    compare(
        lambda: Stack(AttentionBlock, 3), attention_step, plan=plan_of(*actions, "recompute_saving")
    )


@pytest.mark.parametrize("action", ACTIONS)
def test_any_action_may_offload(action: str) -> None:
    """To the disk, which needs no accelerator; the other blocks stay."""
    plan = plan_of("recompute", action, action)
    for block in plan["blocks"][1:]:
        block["offload"] = "disk"
    compare(lambda: Stack(AttentionBlock, 3), attention_step, plan=plan)


def test_plan_of_keep_alone_recomputes_nothing() -> None:
    compare(Stack, square_step, plan=plan_of("keep", "keep", "keep", "keep"))


def test_what_a_plan_says_of_a_block_it_does_to_that_block() -> None:
    """The order in the plan is not that of the model, and a block may be left out."""
    plan = {"blocks": list(reversed(plan_of("keep", "keep", "recompute")["blocks"]))[::2]}
    ours, _ = compare(Stack, square_step, plan=plan)
    assert ours.executions == {"layers.2": 6, "layers.0": 3}


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def operations(model: nn.Module, actions: str | None) -> Counter[Any]:
    seed_all(0)
    x = batch(0, rows=12).view(3, 4, DIM)
    plan = plan_of(*[actions] * 3) if actions else plan_of(*["keep"] * 3)
    with apply_partial_checkpoint(model, plan=plan), _Count() as count:
        model(x).pow(2).mean().backward()
    return count.counts


def test_what_is_saved_is_not_computed_again() -> None:
    model = Stack(AttentionBlock, 3)
    plain = operations(model, None)
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    products, tanh = aten.addmm.default, aten.tanh.default
    assert plain[attention] == 3
    counts = {action: operations(model, action) for action in ACTIONS}
    extra = {
        a: [c[op] - plain[op] for op in (attention, products, tanh)] for a, c in counts.items()
    }
    # Of three products in a block the last need not be computed again: the recompute ends early.
    assert extra == {
        "keep": [0, 0, 0],
        "recompute": [3, 6, 3],
        "recompute_saving": [0, 0, 3],
        "recompute_saving_attention": [0, 6, 3],
    }


class Routed(nn.Module):
    """Sends each row to one expert; all scores are near-ties."""

    def __init__(self, scales_in_place: bool = False) -> None:
        super().__init__()
        self.scales_in_place = scales_in_place
        self.router = nn.Linear(DIM, 2)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).topk(1, dim=-1)
        if self.scales_in_place:
            weight *= 3
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen[:, 0] == index).nonzero()[:, 0]
            result = result.index_add(0, rows, expert(x[rows]) * weight[rows])
        return x + result


@pytest.mark.parametrize("action", ACTIONS[2:])
@pytest.mark.parametrize("scales_in_place", [False, True])
def test_the_choice_of_experts_is_kept(scales_in_place: bool, action: str) -> None:
    """Pitfall 6, report E5: a recompute cannot send a row to another expert. Mixtral scales the
    scores of the chosen ones in place."""

    def model() -> nn.Module:
        return Stack(lambda: Routed(scales_in_place), 2)

    compare(model, square_step, plan=plan_of(action, action), ratio=None)
    with apply_partial_checkpoint(model(), plan=plan_of(action, action)) as handle:
        block = handle.modules[0]
        with _Count() as count:
            block(batch(0)).sum().backward()
    assert count.counts[aten.topk.default] == 1


def test_held_bytes_follow_the_action() -> None:
    model = Stack(AttentionBlock, 3)
    held = {}
    for action in ACTIONS:
        with apply_partial_checkpoint(model, plan=plan_of(*[action] * 3)), track_peak(model) as t:
            before = t.current_bytes
            loss = model(batch(0, rows=12).view(3, 4, DIM)).sum()
            held[action] = t.current_bytes - before
            loss.backward()
            after = t.current_bytes - before - sum(p.nbytes for p in model.parameters())
            assert after <= 4, "nothing is left of what was saved"
    rank = ["recompute", "recompute_saving_attention", "recompute_saving", "keep"]
    assert sorted(held, key=lambda action: held[action]) == rank
    assert len(set(held.values())) == 4


@pytest.mark.parametrize("action", ACTIONS)
def test_a_second_backward(action: str) -> None:
    """Reports F1, F2: torch's own contexts allow one backward; here it is as in plain training."""
    model = Stack(AttentionBlock, 3).eval()
    x = batch(0, rows=12).view(3, 4, DIM)

    def twice(plan: Any) -> list[Tensor]:
        with apply_partial_checkpoint(model, plan=plan):
            loss = model(x).pow(2).mean()
            loss.backward(retain_graph=True)
            loss.backward()
        grads = [p.grad for p in model.parameters()]
        model.zero_grad()
        return grads  # type: ignore[return-value]

    assert_same(twice(plan_of(*[action] * 3)), twice(plan_of("keep", "keep", "keep")))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(x).relu_().mul(2)


def test_a_kept_result_that_is_changed_in_place_is_no_wrong_gradient() -> None:
    """Pitfall 37."""
    plan = plan_of("recompute_saving", "keep")
    compare(lambda: Stack(InPlace, 2), square_step, plan=plan)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Detected that context_fn")
def test_saving_under_torch_compile() -> None:
    model = Stack(AttentionBlock, 3).eval()
    x = batch(0, rows=12).view(3, 4, DIM)
    model(x).pow(2).mean().backward()
    plain = [p.grad for p in model.parameters()]
    model.zero_grad()
    with apply_partial_checkpoint(model, plan=plan_of(*ACTIONS[1:])):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        compiled(x).pow(2).mean().backward()
    for ours, theirs in zip([p.grad for p in model.parameters()], plain, strict=True):
        torch.testing.assert_close(ours, theirs)
    torch._dynamo.reset()


# --- refusals


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (plan_of("keep", "keep", "keep", "keep", "keep"), "'layers.4'.*nearest: 'layers.3'"),
        ({"blocks": [{"name": "", "action": "keep"}]}, "''"),
        (
            {"blocks": [{"name": "layers.0", "class_name": "Other", "action": "keep"}]},
            "another model.*Other.*MlpBlock",
        ),
        (
            {"blocks": [{"name": n, "action": "recompute"} for n in ("layers.0", "layers.0.up")]},
            "'layers.0.up'.*lies in",
        ),
    ],
)
def test_plans_of_other_models(plan: Any, says: str) -> None:
    model = Stack()
    before = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=says):
        apply_partial_checkpoint(model, plan=plan)
    assert [type(m) for m in model.modules()] == before


def test_class_names_that_a_plan_leaves_out_are_filled_in() -> None:
    with apply_partial_checkpoint(Stack(), plan=plan_of("keep", "recompute")) as handle:
        assert [block.class_name for block in handle.plan] == ["MlpBlock", "MlpBlock"]


@pytest.mark.parametrize("beside", [{"every_n": 2}, {"offload": True}, {"layers": MlpBlock}])
def test_a_plan_says_it_all(beside: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(beside))):
        apply_partial_checkpoint(Stack(), plan=plan_of("keep"), **beside)


def test_torch_still_refuses_a_second_backward_under_its_own_contexts() -> None:
    """What `test_a_second_backward` guards against."""
    forward, recompute = create_selective_checkpoint_contexts([aten.mm.default])
    x = torch.ones(2, 2)
    with forward:
        x @ x
    with recompute:
        x @ x
    with recompute, pytest.raises((RuntimeError, IndexError)):
        x @ x
    assert saving.saving_of("recompute") is None
