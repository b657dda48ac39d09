"""Partial activation checkpointing and offload for any PyTorch Lightning model."""

from lightning_ckpt.callbacks import PartialCheckpoint as PartialCheckpoint
from lightning_ckpt.core.apply import apply_partial_checkpoint as apply_partial_checkpoint
from lightning_ckpt.core.blocks import Block as Block
from lightning_ckpt.core.blocks import find_blocks as find_blocks
from lightning_ckpt.core.estimate import estimate as estimate
from lightning_ckpt.core.handle import Handle as Handle
from lightning_ckpt.core.offload import OffloadConfig as OffloadConfig
from lightning_ckpt.core.plan import BlockPlan as BlockPlan
from lightning_ckpt.core.plan import Plan as Plan
from lightning_ckpt.core.recompute import is_recomputing as is_recomputing
from lightning_ckpt.core.report import Difference as Difference
from lightning_ckpt.core.report import Report as Report
from lightning_ckpt.monitor import PeakMemoryMonitor as PeakMemoryMonitor
from lightning_ckpt.plot import draw_estimate as draw_estimate
from lightning_ckpt.strategies import (
    PartialCheckpointDDPStrategy as PartialCheckpointDDPStrategy,
)
from lightning_ckpt.strategies import (
    PartialCheckpointFSDPStrategy as PartialCheckpointFSDPStrategy,
)
from lightning_ckpt.strategies import (
    PartialCheckpointModelParallelStrategy as PartialCheckpointModelParallelStrategy,
)
from lightning_ckpt.strategies import PartialCheckpointStrategy as PartialCheckpointStrategy
from lightning_ckpt.summary import print_estimate as print_estimate
from lightning_ckpt.verifying import verify as verify
