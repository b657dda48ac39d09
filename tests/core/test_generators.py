"""What is told of NumPy's global generator is its state, though NumPy is seldom asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from lightning_ckpt.core.generators import get_state, set_state

DRAWS: dict[str, Callable[[], Any]] = {
    "rand": np.random.rand,
    "randint": lambda: np.random.randint(7),
    "normal": np.random.normal,
    "shuffle": lambda: np.random.shuffle([1, 2, 3]),
    "whole round": lambda: np.random.bytes(4 * 624),
    "seed": lambda: np.random.seed(5),
}


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    np.random.seed(0)
    yield
    np.random.seed(0)


def check() -> None:
    np.testing.assert_equal(get_state(np.random), np.random.get_state(legacy=False))


@pytest.mark.parametrize("name", DRAWS)
def test_every_draw_is_noticed(name: str) -> None:
    check()
    for _ in range(3):
        DRAWS[name]()
        check()


def test_the_second_of_a_pair_of_normals_is_noticed() -> None:
    """It moves no word of the generator's memory: it was made together with the first."""
    check()
    for _ in range(4):
        np.random.normal()
        check()


def test_a_waiting_normal_number_that_we_put_back_is_noticed() -> None:
    np.random.normal()
    waiting = get_state(np.random)
    np.random.normal()
    check()
    set_state(np.random, waiting)
    check()
    assert get_state(np.random)["has_gauss"] == 1


def test_numpy_is_not_asked_when_nothing_was_drawn() -> None:
    """Asking takes longer than all else that is done for a block."""
    assert get_state(np.random) is get_state(np.random)


def test_another_bit_generator() -> None:
    own = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        check()
        np.random.rand()
        check()
    finally:
        np.random.set_bit_generator(own)
