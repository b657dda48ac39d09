"""Where the inputs of checkpointed blocks wait for backward."""

from lightning_ckpt.core.offload.config import OffloadConfig, read_offload
from lightning_ckpt.core.offload.targets import nothing_to_move, saved_inputs

__all__ = ["OffloadConfig", "nothing_to_move", "read_offload", "saved_inputs"]
