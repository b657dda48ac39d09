"""Forks beside an engine that offloads to a file. Run by test_offload_fork.py; what it prints says
what went wrong in each part."""

import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from lightning_ckpt.core.offload.disk import DiskTarget
from lightning_ckpt.core.offload.schedule import Scheduler
from lightning_ckpt.core.offload.slots import Place
from lightning_ckpt.core.offload.targets import Source

SIZE = 20_000
SECONDS = 60  # longer is a hang
DIRECTORY = sys.argv[1]


def a_tensor(value: float) -> torch.Tensor:
    return torch.full((SIZE,), float(value))


def check(storage: torch.UntypedStorage, value: float) -> None:
    values = torch.empty(0).set_(storage, 0, (SIZE,), (1,))
    assert values.eq(value).all(), f"{values[0]} in place of {value}"


def a_scheduler() -> Scheduler:
    return Scheduler(DiskTarget(DIRECTORY), prefetch=1, keep_last=0)


def save(scheduler: Scheduler, tensor: torch.Tensor) -> Place:
    place = scheduler.save(scheduler.open_call(), tensor)
    scheduler.close_call()
    return place


def step(scheduler: Scheduler, first: int, number: int = 4) -> None:
    values = range(first, first + number)
    places = [save(scheduler, a_tensor(value)) for value in values]
    for value in reversed(values):
        check(scheduler.use(places.pop()), value)


def fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(SECONDS)
            work()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
        finally:
            os._exit(1)
    return child


def join(child: int, what: str) -> None:
    ended = os.waitpid(child, 0)[1]
    assert ended == 0, f"{what}: the child {'hung' if os.WIFSIGNALED(ended) else 'failed'}"


def is_refused(work: Callable[[], Any]) -> bool:
    try:
        work()
    except RuntimeError as error:
        return "before this process was forked" in str(error)
    return False


def files() -> None:
    target = DiskTarget(DIRECTORY)
    sent = [target.send(Source(a_tensor(value))) for value in (1, 5)]
    for parcel in sent:
        parcel.finish()
    other, ours = os.pipe(), os.pipe()

    def send(value: float, tell: int, hear: int) -> None:
        parcel = target.send(Source(a_tensor(value)))
        parcel.finish()
        os.write(tell, b"x")
        os.read(hear, 1)
        check(parcel.fetch().wait(), value)

    def work() -> None:
        send(2, other[1], ours[0])
        for parcel in sent:
            assert is_refused(parcel.fetch)

    child = fork(work)
    send(3, ours[1], other[0])
    for parcel, value in zip(sent, (1, 5), strict=True):
        check(parcel.fetch().wait(), value)
    join(child, "files")


def under_way() -> None:
    scheduler, mask = a_scheduler(), a_tensor(9)
    parent, gate, write = os.getpid(), threading.Event(), os.pwrite

    def slow(*args: Any) -> int:
        assert os.getpid() != parent or gate.wait(SECONDS)
        return write(*args)

    os.pwrite = slow
    places = [save(scheduler, mask), save(scheduler, a_tensor(7))]

    def work() -> None:
        step(scheduler, 20)
        check(scheduler.use(save(scheduler, mask)), 9)
        for place, value in zip(places, (9, 7), strict=True):
            assert place.slot.source.tensor is not None
            check(scheduler.use(place), value)

    join(fork(work), "under way")
    gate.set()
    os.pwrite = write
    for place, value in zip(places, (9, 7), strict=True):
        check(scheduler.use(place), value)


def away() -> None:
    scheduler, mask = a_scheduler(), a_tensor(9)
    place = save(scheduler, mask)
    scheduler.settle()
    assert place.slot.source.tensor is None

    def work() -> None:
        check(scheduler.use(save(scheduler, mask)), 9)
        assert is_refused(lambda: scheduler.use(place))

    join(fork(work), "away")
    check(scheduler.use(place), 9)


def held() -> None:
    scheduler = a_scheduler()
    is_held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with scheduler.lock:
            is_held.set()
            over.wait(SECONDS)

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_held.wait(SECONDS)
    join(fork(lambda: step(scheduler, 1)), "held")
    over.set()
    thread.join()
    step(scheduler, 5)


def many() -> None:
    kept = [a_scheduler()]
    over, failed = threading.Event(), []

    def train(scheduler: Scheduler) -> None:
        try:
            for number in range(10**9):
                if over.is_set():
                    return
                step(scheduler, 4 * number % 1000)
        except BaseException as error:
            failed.append(error)

    def collect() -> None:
        gc.collect()
        kept.clear()
        gc.collect()

    gc.freeze()  # only what comes later is looked through in a child: all takes seconds
    thread = threading.Thread(target=train, args=tuple(kept))
    thread.start()
    try:
        works = {"exit": lambda: None, "collect": collect, "step": lambda: step(kept[0], 2000, 6)}
        for index in range(210):
            time.sleep(0.0005 * (index % 7))
            what = list(works)[index % 3]
            join(fork(works[what]), what)
            assert not failed, failed
    finally:
        over.set()
        thread.join()
    assert not failed, failed


if __name__ == "__main__":
    torch.set_num_threads(1)
    said = {}
    for part in (files, under_way, away, held, many):
        try:
            part()
            said[part.__name__] = ""
        except Exception as error:
            said[part.__name__] = repr(error)
    print(json.dumps(said))
