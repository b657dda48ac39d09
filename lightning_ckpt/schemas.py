"""Which keys the groups of `conf/` have, of which types, within which bounds. Plain data: nothing
here names Hydra."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from lightning_ckpt.core.apply import check_words
from lightning_ckpt.core.blocks import check_layers
from lightning_ckpt.core.offload import read_offload
from lightning_ckpt.core.out_of_memory.tighten import read_on_oom
from lightning_ckpt.core.plan import check_every_n, read_plan
from lightning_ckpt.monitor_settings import MonitorSettings


@dataclass
class PlanConfig:
    """What `lightning_ckpt.PartialCheckpoint` takes, and the strategies add to Lightning's own
    arguments: `strategy=ddp`."""

    _target_: str
    _convert_: str
    every_n: int
    offload: Any
    layers: Any
    budget: Any
    plan: Any
    on_oom: str

    def __post_init__(self) -> None:
        check_every_n(self.every_n)
        read_on_oom(self.on_oom)
        read_offload(self.offload)
        check_layers(self.layers)
        if self.every_n != 1 and (self.budget is not None or self.plan is not None):
            raise ValueError(  # the group's file says it, so the user may not know
                f"every_n={self.every_n} contradicts budget and plan, which choose what happens to "
                "each block; set every_n=1 as well, or take checkpoint=budget"
            )
        check_words(self.every_n, self.offload, self.layers, self.budget, self.plan)
        if self.plan is not None:
            read_plan(self.plan)


@dataclass
class PartialCheckpointConfig(PlanConfig):
    """The arguments of `lightning_ckpt.PartialCheckpoint`: `checkpoint=partial`."""

    verify: bool


@dataclass
class PlanCheckpointConfig(PartialCheckpointConfig):
    """`checkpoint=plan`: as a file says."""

    def __post_init__(self) -> None:
        if self.plan is None:
            raise ValueError("plan is not given; say checkpoint.plan=FILE, or checkpoint=partial")
        super().__post_init__()


@dataclass
class OffloadGroupConfig:
    """The fields of `lightning_ckpt.OffloadConfig`: `+offload@checkpoint.offload=disk`."""

    target: str
    scope: str
    directory: str | None
    min_bytes: int
    prefetch: int
    max_host_bytes: int | None
    keep_last: int


@dataclass
class FullCheckpointConfig(PartialCheckpointConfig):
    """`checkpoint=full`: every block."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every_n != 1:
            raise ValueError(
                f"every_n={self.every_n} contradicts checkpoint=full, which is every_n=1; "
                f"use checkpoint=partial"
            )


@dataclass
class PeakMemoryConfig:
    """The arguments of `lightning_ckpt.PeakMemoryMonitor`: the group `monitor`."""

    _target_: str
    breakdown: bool
    plot: bool
    every_n_epochs: int
    first_steps: int | None
    snapshot: Any
    table: bool

    def __post_init__(self) -> None:
        MonitorSettings(
            every_n_epochs=self.every_n_epochs,
            first_steps=self.first_steps,
            snapshot=self.snapshot,
            plot=self.plot,
        )


@dataclass
class TrainerConfig:
    """The group `trainer`; `+trainer.KEY=VALUE` sets any other argument of `lightning.Trainer`."""

    _target_: str
    _convert_: str
    default_root_dir: str | None
    max_epochs: int | None
    max_steps: int
    accelerator: str
    devices: Any
    precision: str
    accumulate_grad_batches: int
    gradient_clip_val: float | None
    limit_train_batches: int | float
    limit_val_batches: int | float
    num_sanity_val_steps: int
    log_every_n_steps: int
    enable_model_summary: bool

    def __post_init__(self) -> None:
        _at_least(1, accumulate_grad_batches=self.accumulate_grad_batches)
        _at_least(1, log_every_n_steps=self.log_every_n_steps)
        _at_least(-1, max_steps=self.max_steps, num_sanity_val_steps=self.num_sanity_val_steps)
        if self.max_epochs is not None:
            _at_least(-1, max_epochs=self.max_epochs)


@dataclass
class ModelConfig:
    """What all models have: AdamW's settings."""

    takes: ClassVar[str]  # what the batches must hold
    _target_: str
    learning_rate: float
    weight_decay: float

    def __post_init__(self) -> None:
        _at_least(0, learning_rate=self.learning_rate, weight_decay=self.weight_decay)


@dataclass
class TransformerConfig(ModelConfig):
    """A stack of transformer blocks."""

    num_layers: int
    width: int
    num_heads: int
    dropout: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(1, num_layers=self.num_layers, width=self.width, num_heads=self.num_heads)
        _share(dropout=self.dropout)
        if self.width % self.num_heads:
            raise ValueError(
                f"width={self.width} is no multiple of num_heads={self.num_heads}; "
                "each head gets an equal part of the width"
            )


@dataclass
class GPTConfig(TransformerConfig):
    """`model=gpt`."""

    takes: ClassVar[str] = "text"
    vocab_size: int
    sequence_length: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(256, vocab_size=self.vocab_size)  # the tokens are bytes
        _at_least(1, sequence_length=self.sequence_length)


@dataclass
class ViTConfig(TransformerConfig):
    """`model=vit`."""

    takes: ClassVar[str] = "images"
    patch_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(1, patch_size=self.patch_size)
        if 8 % self.patch_size:
            raise ValueError(
                f"patch_size={self.patch_size} does not divide the images' side of 8 pixels"
            )


@dataclass
class HFCausalLMConfig(ModelConfig):
    """`model=hf_causal_lm`."""

    takes: ClassVar[str] = "text"
    config: Any
    sequence_length: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(1, sequence_length=self.sequence_length)
        if find_spec("transformers") is None:
            raise ValueError(
                "_target_: hf_causal_lm needs the package transformers, which is not installed; "
                "pip install 'lightning-ckpt[hf]'"
            )
        if isinstance(self.config, str):
            if not (Path(self.config) / "config.json").is_file():
                raise ValueError(
                    f"config={self.config!r} is no local directory with a config.json; give one, "
                    "or a model type: model.config.model_type=gpt2"
                )
        elif not isinstance(self.config, dict) or "model_type" not in self.config:
            raise ValueError(f"config={self.config!r} has no model_type; say for example gpt2")


@dataclass
class DataConfig:
    """What all data have."""

    gives: ClassVar[str]  # what the batches hold
    _target_: str
    batch_size: int
    val_fraction: float
    num_workers: int
    seed: int

    def __post_init__(self) -> None:
        _at_least(1, batch_size=self.batch_size)
        _at_least(0, num_workers=self.num_workers, seed=self.seed)
        _share(val_fraction=self.val_fraction)
        if self.val_fraction == 0:
            raise ValueError("val_fraction must be above 0, got 0.0; validation needs data")


@dataclass
class TextConfig(DataConfig):
    """`data=text`."""

    gives: ClassVar[str] = "text"
    path: str | None
    max_bytes: int | None
    sequence_length: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(1, sequence_length=self.sequence_length)
        if self.max_bytes is not None:
            _at_least(1, max_bytes=self.max_bytes)
        if self.path is not None and not Path(self.path).exists():
            raise ValueError(
                f"path={self.path!r} does not exist; give a file or a folder, or null for the "
                "sources of Python's standard library"
            )


@dataclass
class DigitsConfig(DataConfig):
    """`data=digits`."""

    gives: ClassVar[str] = "images"


def _at_least(bound: int, **values: float) -> None:
    for name, value in values.items():
        if value < bound:
            raise ValueError(f"{name} must be at least {bound}, got {value}")


def _share(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name} must be at least 0 and below 1, got {value}")
