"""Offload as something that a planner may choose: what the user allows, and how fast the way is."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias, get_args

import torch

from lightning_ckpt.core.budget.clock import Clock
from lightning_ckpt.core.budget.waiting import Link
from lightning_ckpt.core.offload import make_target, nothing_to_move
from lightning_ckpt.core.offload.config import OffloadConfig, read_offload
from lightning_ckpt.core.offload.machine import host_budget
from lightning_ckpt.core.offload.targets import Source, Target, as_bytes
from lightning_ckpt.core.plan import Action, Choice

_MOST_BYTES = 64 * 2**20  # of a trial copy; larger ones are no faster
_NUM_TRIALS = 3  # the first pins memory, or makes the file


def weighed(offload: Any) -> OffloadConfig | None:
    """What the user allows a planner to offload; None: nothing.

    A bool or a word leaves it all to the planner; the `scope` of an `OffloadConfig` says what it
    may choose from.

    Raises:
        TypeError, ValueError: as `read_offload`.
    """
    config = read_offload(offload)
    if config is None or isinstance(offload, (OffloadConfig, dict)):
        return config
    return replace(config, scope="all")


def choices_with(config: OffloadConfig | None) -> tuple[Choice, ...]:
    """All actions, and those with offload that `config` allows."""
    actions: tuple[Choice, ...] = get_args(Action)
    inputs: tuple[Choice, ...] = ("recompute_offloaded",)
    kept: tuple[Choice, ...] = ("keep_offloaded",)
    if config is None:
        return actions
    return (*actions, *{"inputs": inputs, "kept": kept, "all": inputs + kept}[config.scope])


class LinkProbe:
    """Measures the way to where tensors would wait, by some copies there and back.

    Args:
        config: says where.

    Raises:
        ValueError: the machine cannot do what `config` says.
    """

    def __init__(self, config: OffloadConfig) -> None:
        self.min_bytes = config.min_bytes
        self._target: Target | None = make_target(config)
        is_bounded = config.target == "host" and not nothing_to_move(config)
        self._link: Link | None = None  # once it is measured
        self._room = host_budget(config.max_host_bytes) if is_bounded else None

    def link(self, num_bytes: int, clock: Clock) -> Link:
        """The link, between two steps. At first it is measured, which takes as many bytes of the
        device, and some milliseconds.

        Args:
            num_bytes: of a copy, as large as those to come.
            clock: of the device.
        """
        if self._target is None:
            return Link(1.0, 1.0, room_bytes=0)
        if not num_bytes:
            return Link(float("inf"), float("inf"), room_bytes=self._room)
        if self._link is None:
            self._link = self._measured(self._target, num_bytes, clock)
        return self._link

    def _measured(self, target: Target, num_bytes: int, clock: Clock) -> Link:
        data = torch.ones(min(num_bytes, _MOST_BYTES), dtype=torch.uint8, device=clock.device)
        trials: list[_Trial] = []
        with suppress(OSError):  # whoever offloads will hear of it
            trials = list(_trials(target, data, clock))
        if not trials:
            return Link(1.0, 1.0, room_bytes=0)
        out, back, handed = (min(column) for column in zip(*trials, strict=True))
        least = 1e-9
        speeds = data.nbytes / max(out, least), data.nbytes / max(back, least)
        return Link(*speeds, call_seconds=handed, room_bytes=self._room)


_Trial: TypeAlias = tuple[float, float, float]


def _trials(target: Target, data: torch.Tensor, clock: Clock) -> Iterator[_Trial]:
    """Seconds out, back, and of handing over. As far as a target times its copies itself, those are
    taken: its `finish` may come before the slower part of the way."""
    for _ in range(_NUM_TRIALS):
        before = target.moved()
        begin = clock.mark()
        parcel = target.send(Source(data))
        if parcel is None:  # no room
            return
        sent = clock.mark()
        parcel.finish()
        out = clock.mark()
        arrival = parcel.fetch()
        as_bytes(arrival.wait())
        back = clock.mark()
        clock.synchronize()
        del parcel, arrival  # and with them the copy
        timed = [
            now.seconds - then.seconds for now, then in zip(target.moved(), before, strict=True)
        ]
        seconds = clock.seconds(begin, out), clock.seconds(out, back)
        yield timed[0] or seconds[0], timed[1] or seconds[1], clock.seconds(begin, sent)
