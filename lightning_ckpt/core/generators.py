"""Random streams that torch's checkpoint does not replay: Python's and NumPy's global ones, and
generators that a block keeps as attributes or is given."""

import ctypes
import functools
import random
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

States = list[tuple[Any, Any]]  # generator, state

_MERSENNE_BYTES = 4 * 624 + 4  # the words and the place among them; a test looks at a draw of each
_last_read: tuple[Any, bytes, Any] | None = None  # NumPy's bit generator, its bytes, its state


def generators_in(objects: Iterable[Any]) -> list[Any]:
    """The global generators, and those among `objects`."""
    found: list[Any] = [random]
    numpy = sys.modules.get("numpy")  # a block cannot draw from what nobody imported
    if numpy is not None:
        found.append(numpy.random)
    return found + [o for o in objects if is_generator(type(o))]  # type: ignore[arg-type]


def torch_generators() -> list[torch.Generator]:
    """Torch's global generators: of the CPU, and of each device in use."""
    found = [torch.default_generator]
    if torch.accelerator.is_available():
        device = torch.get_device_module(torch.accelerator.current_accelerator())
        found += getattr(device, "default_generators", ())
    return found


@functools.cache  # asked for every attribute at every call, and `torch.Generator` is slow to ask
def is_generator(kind: type) -> bool:
    """Whether objects of this class are random streams with a state."""
    numpy = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    # A SystemRandom has no state: the kernel draws.
    return issubclass(kind, kinds) and not issubclass(kind, random.SystemRandom)


def get_state(generator: Any) -> Any:
    """The state of a generator, or of one of the modules `random` and `numpy.random`."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if hasattr(generator, "getstate"):
        return generator.getstate()
    if generator is sys.modules.get("numpy.random"):
        return _global_numpy_state(generator)
    if hasattr(generator, "get_state"):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def _global_numpy_state(numpy_random: Any) -> Any:
    """NumPy takes long to tell its state (35 us), and it is asked twice for each block, mostly in
    vain: so look first whether its memory has moved since. One thing does not stand in there, the
    second of a pair of normal numbers, made and not drawn yet: while there is one, ask again."""
    global _last_read
    source = getattr(numpy_random, "get_bit_generator", None)  # since NumPy 1.24
    bits: Any = source() if source else None
    if type(bits).__name__ != "MT19937":  # another may have been put in, of another size
        return numpy_random.get_state(legacy=False)
    memory = ctypes.string_at(bits.ctypes.state_address, _MERSENNE_BYTES)
    if _last_read is not None and _last_read[0] is bits and _last_read[1] == memory:
        return _last_read[2]
    state = numpy_random.get_state(legacy=False)
    _last_read = None if state["has_gauss"] else (bits, memory, state)
    return state


def set_state(generator: Any, state: Any) -> None:
    """Put a generator back to a state that `get_state` gave."""
    global _last_read
    _last_read = None  # the memory may be the same, and a normal number wait in it
    if hasattr(generator, "setstate"):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def is_same(now: Any, before: Any) -> bool:
    """Whether two states of one generator are equal."""
    if now is before:
        return True
    if isinstance(now, Tensor):
        return torch.equal(now, before)
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(is_same(now[key], before[key]) for key in now)
    return bool((now == before).all()) if hasattr(now, "all") else bool(now == before)
