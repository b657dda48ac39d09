"""A block checkpoints itself because its class is exchanged, and nothing else is.

The block gets a subclass of its own class with another `forward`. So names, hooks, `isinstance`,
attributes and `state_dict` are what they were; hooks on the block, FSDP2's too, stay outside the
recompute; there is no closure on the instance that a copy would carry along. Copies and pickles
are of the plain class.
"""

import copyreg
import functools
import inspect
import types
from abc import ABCMeta
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from torch import nn

from lightning_ckpt.core import _transformers
from lightning_ckpt.core.offload import followed_forward, kept_forward, saving
from lightning_ckpt.core.plan import Action
from lightning_ckpt.core.recompute import Options, checkpointed_forward
from lightning_ckpt.core.saving import saving_of


class _Checkpointed:
    """Marks our classes. Stands first in them, so that a class that registers its subclasses, or
    demands arguments of them, does not hear of ours. (No `__slots__`: CPython then takes this for
    the base that decides the layout, and refuses to exchange the class.)"""

    _plain_class: type[nn.Module]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


_classes: WeakValueDictionary[tuple[type, Action, bool, bool], type] = WeakValueDictionary()
_plain_classes: WeakKeyDictionary[type, type] = WeakKeyDictionary()  # of those laid over ours


def swap_in(block: nn.Module, action: Action, offloads: bool) -> None:
    """Make `block` do what a plan says from now on.

    Args:
        block: the block.
        action: whether it checkpoints itself.
        offloads: whether what it saves for backward goes to the offload in force for it; that may
            only follow it otherwise.
    """
    key = (plain_class(type(block)), action, offloads, "forward" in vars(block))
    swapped = _classes.get(key)
    if swapped is None:
        swapped = _classes[key] = _subclass(*key)
    _set_class(block, swapped)


def swap_out(block: nn.Module) -> None:
    """Take our class out of whatever class `block` has by now, if it is in there."""
    if is_swapped(block):
        _set_class(block, plain_class(type(block)))


def is_swapped(block: nn.Module) -> bool:
    """Whether `block` has a class of ours."""
    return isinstance(block, _Checkpointed)


def plain_class(cls: type) -> type:
    """`cls` without our class in it.

    Others may have laid a class over ours meanwhile (FSDP2's `fully_shard` does); then theirs is
    made anew over the plain one.
    """
    if not issubclass(cls, _Checkpointed):
        return cls
    if "_plain_class" in vars(cls):
        return cls._plain_class
    if cls not in _plain_classes:
        bases = tuple(plain_class(base) for base in cls.__bases__)
        content = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
        _plain_classes[cls] = _new_class(type(cls), cls.__name__, bases, content)
    return _plain_classes[cls]


def _set_class(block: nn.Module, cls: type) -> None:
    object.__setattr__(block, "__class__", cls)


def _subclass(base: type[nn.Module], action: Action, offloads: bool, own_forward: bool) -> type:
    """Make the class.

    Args:
        base: the block's class.
        action, offloads: as in `swap_in`.
        own_forward: whether the instance has a `forward` of its own, which Python would prefer to
            that of the class: then ours is a property, which comes first, and calls it. (Dynamo
            follows a plain function better, so it is that otherwise.)
    """
    saved_inputs = functools.partial(saving, is_recomputed=True)
    options = Options(saved_inputs, _transformers.is_of_library(base), saving_of(action), offloads)
    kept = kept_forward if offloads else followed_forward
    is_function = isinstance(inspect.getattr_static(base, "forward"), types.FunctionType)

    def plain_forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if own_forward and "forward" in vars(self):
            return vars(self)["forward"](*args, **kwargs)
        if not is_function:  # a staticmethod, a property, an object: Python knows how to get it
            return super(swapped, self).forward(*args, **kwargs)  # type: ignore[arg-type]
        return base.forward(self, *args, **kwargs)

    def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, _Checkpointed):  # somebody kept this method beyond the swap
            return plain_forward(self, *args, **kwargs)
        if action == "keep":
            return kept(self, plain_forward, args, kwargs)
        return checkpointed_forward(self, plain_forward, args, kwargs, options)

    if is_function:
        functools.update_wrapper(forward, base.forward)  # its signature, for those who ask

    content: dict[str, Any] = {
        "__doc__": base.__doc__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__reduce_ex__": _reduce_plainly,
        "_plain_class": base,
        "forward": _forward_property(forward) if own_forward else forward,
    }
    for name in ("__copy__", "__deepcopy__"):
        if hasattr(base, name):
            content[name] = _copy_plainly(getattr(base, name))
    swapped = _new_class(type(base), base.__name__, (_Checkpointed, base), content)
    return swapped


def _new_class(meta: type, name: str, bases: tuple[type, ...], content: dict[str, Any]) -> type:
    """Make a class without a metaclass of the user's, which may register it or want arguments."""
    if meta in (type, ABCMeta):
        return meta(name, bases, content)
    return type.__new__(meta, name, bases, content)


def _forward_property(forward: Callable[..., Any]) -> property:
    def get(self: nn.Module) -> Any:
        return types.MethodType(forward, self)

    def put(self: nn.Module, value: Any) -> None:
        vars(self)["forward"] = value

    def delete(self: nn.Module) -> None:
        vars(self).pop("forward")

    return property(get, put, delete)


def _copy_plainly(copy_method: Callable[..., Any]) -> Callable[..., Any]:
    def copy(self: nn.Module, *args: Any) -> Any:
        copied = copy_method(self, *args)
        swap_out(copied)
        return copied

    return copy


def _reduce_plainly(self: nn.Module, protocol: Any) -> Any:
    """Pickle and copy as an instance of the plain class, by the way that this class chose."""
    base = plain_class(type(self))
    reduced: Any = getattr(base, "__reduce_ex__")(self, protocol)  # noqa: B009 (mypy knows no more)
    if isinstance(reduced, str):
        return reduced
    make, arguments, *rest = reduced
    if make is copyreg.__newobj__:  # type: ignore[attr-defined]
        # Pickle holds the class of that against the object's; what it does for older protocols
        # does the same and asks nothing.
        _, *more = arguments
        make, arguments = base.__new__, (base, *more)
        if not more:
            make, arguments = copyreg._reconstructor, (base, object, None)  # type: ignore[attr-defined]
    return (_plain(make), tuple(_plain(value) for value in arguments), *rest)


def _plain(value: Any) -> Any:
    if isinstance(value, type):
        return plain_class(value)
    if isinstance(value, types.MethodType) and isinstance(value.__self__, type):
        return getattr(plain_class(value.__self__), value.__name__)
    return value
