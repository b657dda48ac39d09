"""Made-up steps whose numbers fit together as those of measured ones do."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from lightning_ckpt.core.budget.costs import Call, Kind, Measurement, Option, Segment
from lightning_ckpt.core.budget.inputs import Saved
from lightning_ckpt.core.budget.waiting import Link, Movable, offloaded, windows
from lightning_ckpt.core.plan import Choice


class Block(NamedTuple):
    """What a block takes, in bytes, and its time."""

    activations: int
    result: int  # of its own, if it saves that
    is_late: bool  # nobody else holds its result when the backward comes to it
    is_alone: bool  # it alone holds its input
    others: int  # bytes that it saves, and others hold
    temporary: int
    seconds: float
    saving: float  # the part of its activations that selective checkpointing keeps; 0: none
    saves_result: bool


def some_block(rng: random.Random, result: int) -> Block:
    return Block(
        activations=100 * rng.randint(0, 60),
        result=rng.choice([0, result]),
        is_late=rng.random() < 0.25,
        is_alone=rng.random() < 0.85,
        others=rng.choice([0, 0, 100 * rng.randint(1, 20)]),
        temporary=100 * rng.randint(0, 40),
        seconds=rng.uniform(0.2, 3),
        saving=rng.choice([0, rng.uniform(0.1, 0.9)]),
        saves_result=rng.random() < 0.3,
    )


def some_step(rng: random.Random, num: int) -> Measurement:
    """A chain of blocks, of which most may offload, through a link of any speed."""
    sizes = [100 * rng.randint(1, 40) for _ in range(num + 1)]  # of inputs, and of the last result
    blocks = [some_block(rng, size) for size in sizes[1:]]
    segments = _segments(rng, sizes, blocks)
    calls = _calls(rng, sizes, blocks, segments)
    names = tuple(f"layers.{index}" for index in range(num))
    seconds = 4 * sum(block.seconds for block in blocks)
    return Measurement(names, ("B",) * num, calls, segments, seconds, {"parameters": 0})


def _segments(rng: random.Random, sizes: list[int], blocks: list[Block]) -> tuple[Segment, ...]:
    live, segments = 1000 * rng.randint(0, 20) + sizes[0], []

    def add(kind: Kind, call: int | None, more: int) -> None:
        segments.append(Segment(kind, call, live, live + more))

    for index, (block, result) in enumerate(zip(blocks, sizes[1:], strict=True)):
        add("forward", index, max(result, block.temporary))
        live += result
        if rng.random() < 0.3:
            add("outside", None, rng.choice([0, 100 * rng.randint(0, 50)]))
    add("outside", None, rng.choice([0, 100 * rng.randint(0, 200)]))
    for index, block in reversed([*enumerate(blocks)]):  # the result gives way to its gradient
        held = block.activations + block.result
        add("recompute", index, held + 100 * rng.randint(0, 20))
        live += held
        add("outside", None, sizes[index] + 100 * rng.randint(0, 60))
        live -= held + sizes[index + 1] - 100 * rng.randint(0, 5)
    add("outside", None, rng.choice([0, 100 * rng.randint(0, 300)]))
    return tuple(segments)


def _calls(
    rng: random.Random, sizes: list[int], blocks: list[Block], segments: tuple[Segment, ...]
) -> tuple[Call, ...]:
    known = windows((segment.kind, segment.call) for segment in segments)
    backward = [segment.kind for segment in segments].index("recompute")
    speed, how_often_held = 10 ** rng.uniform(2, 5), rng.choice([0, 0.2, 0.7])
    link, calls = Link(speed, speed * rng.choice([0.7, 1, 2]), rng.choice([0, 0.01])), []
    for index, block in enumerate(blocks):
        options = _options(rng, block, sizes[index + 1])
        if (window := known.get(index)) is None:
            calls.append(Call(index, options))
            continue
        gone = window.leaves
        if rng.random() < how_often_held:  # by the model's code
            gone = rng.randint(gone, max(gone, backward))
        alone = sizes[index] if block.is_alone else 0
        producers = (index - 1,) if index and alone else ()
        inputs = Saved(alone, sizes[index] - alone + block.others, gone, producers)
        movable = Movable(inputs, block.activations, block.result, block.others)
        options |= offloaded(options, movable, link, rng.uniform(0.5, 3) * block.seconds)
        calls.append(Call(index, options, window.leaves, gone, window.returns, producers))
    return tuple(calls)


def _options(rng: random.Random, block: Block, result: int) -> dict[Choice, Option]:
    held, late = block.activations, block.result if block.is_late else 0
    higher = max(0, held + block.result - max(block.temporary, result))
    options: dict[Choice, Any] = {
        "recompute": Option(0, 0, 0, block.seconds),
        "keep": Option(held, higher, None, 0.0, late, block.result),
    }
    if block.saving:
        part, output = int(held * block.saving), result if block.saves_result else 0
        rises = rng.randint(0, part), rng.randint(0, part // 2)
        seconds = rng.uniform(0.05, 0.8) * block.seconds
        options["recompute_saving"] = Option(part, *rises, seconds, 0, output)
    return options
