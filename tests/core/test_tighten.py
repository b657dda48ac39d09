"""From a plan to one that needs less: pure functions on plain data."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ckpt.core.out_of_memory.tighten import read_on_oom, tightened
from lightning_ckpt.core.plan import Action, BlockPlan, Plan, every_n_plan


def plan_of(*actions: Action, offload: Any = None) -> Plan:
    return Plan(tuple(BlockPlan(f"b{i}", "B", action, offload) for i, action in enumerate(actions)))


def actions_of(plan: Plan | None) -> list[Action]:
    assert plan is not None
    return [block.action for block in plan]


def test_half_of_the_kept_blocks_the_earliest_first() -> None:
    plan: Plan | None = plan_of("keep", "recompute", *["keep"] * 5)
    seen = []
    while plan is not None:
        seen.append("".join(action[0] for action in actions_of(plan)))
        plan = tightened(plan)
    assert seen == ["krkkkkk", "rrrrkkk", "rrrrrrk", "rrrrrrr"]


def test_the_last_try_recomputes_all() -> None:
    assert set(actions_of(tightened(plan_of(*["keep"] * 9), is_last=True))) == {"recompute"}


def test_partly_saving_blocks_are_recomputed_as_a_whole() -> None:
    plan = plan_of("recompute_saving", "recompute", "recompute_saving_attention", "keep")
    assert actions_of(tightened(plan)) == ["recompute", "recompute", "recompute", "keep"]


@given(st.lists(st.sampled_from(get_args(Action)), min_size=1, max_size=20))
def test_it_ends(actions: list[Action]) -> None:
    plan: Plan | None = plan_of(*actions)
    loose = sum(action != "recompute" for action in actions)
    for _ in range(loose.bit_length()):
        assert plan is not None
        plan = tightened(plan)
    assert plan is not None
    assert set(actions_of(plan)) == {"recompute"}
    assert tightened(plan) is None


@pytest.mark.parametrize(
    ("scope", "place"), [("inputs", "host"), ("kept", "host"), ("all", "host")]
)
def test_inputs_of_new_recomputes_wait_where_the_others_do(scope: str, place: str) -> None:
    blocks = [(f"b{i}", "B") for i in range(4)]
    plan = tightened(every_n_plan(blocks, 2, "host", ("note",), scope))
    assert plan is not None
    assert plan.blocks[1] == BlockPlan("b1", "B", "recompute", "host")
    assert plan.notes == ("note",)
    assert plan.every_n is None


def test_nothing_is_offloaded_that_was_not() -> None:
    plan = tightened(every_n_plan([("a", "B"), ("b", "B")], 2, None))
    assert plan is not None
    assert plan.offload is None


@pytest.mark.parametrize("word", ["Tighten", "", None, True, 3, ["tighten"]])
def test_other_words(word: Any) -> None:
    with pytest.raises(ValueError, match="on_oom") as caught:
        read_on_oom(word)
    assert repr(word) in str(caught.value)
    assert "'tighten'" in str(caught.value)


def test_known_words() -> None:
    assert [read_on_oom(word) for word in ("raise", "tighten")] == ["raise", "tighten"]
