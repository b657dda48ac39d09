"""Settings around a forward that its result may depend on, and that torch's checkpoint does not
replay: backward runs outside of the `with` blocks that the forward stood in."""

import contextvars
from collections.abc import Callable
from typing import Any

import torch
from torch.backends import cuda

# What `torch.nn.attention.sdpa_kernel` sets, on every device.
_ATTENTION = (
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
)


class Surroundings:
    """Context variables, default dtype and allowed attention kernels, as they are now."""

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._dtype = torch.get_default_dtype()
        self._kernels = [is_enabled() for is_enabled, _ in _ATTENTION]

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call `function` in these surroundings, and restore those of now."""
        now = Surroundings()
        self._set()
        try:
            # A copy, since a context cannot be entered while it is in use further out.
            return self._context.copy().run(function, *args, **kwargs)
        finally:
            now._set()

    def _set(self) -> None:
        if torch.get_default_dtype() != self._dtype:
            torch.set_default_dtype(self._dtype)
        for (is_enabled, enable), wanted in zip(_ATTENTION, self._kernels, strict=True):
            if is_enabled() != wanted:
                enable(wanted)
