"""Lightning's strategies, with a plan put in force at the one right moment: after the model is
built, before it is wrapped and before the optimizers are made."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
    StrategyRegistry,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_ckpt._lightning import checkpoints_by_itself
from lightning_ckpt.core.handle import Handle
from lightning_ckpt.core.offload import OffloadConfig
from lightning_ckpt.fitting import FitPlan
from lightning_ckpt.refusals import refuse_xla


class _PartialCheckpointing(Strategy):
    """The part that all engines share: stands before one of Lightning's strategies.

    Args:
        every_n: block `i` is checkpointed when `i % every_n == 0`; 1 is every block.
        offload: True or "host" moves the checkpointed blocks' inputs to pinned host memory until
            backward, "disk" to a file; an `OffloadConfig` says more.
        layers: which modules are the blocks, if not those that are found by themselves; as in
            `PartialCheckpoint`.
        budget, plan: in place of `every_n`, as in `PartialCheckpoint`.
        on_oom: as in `PartialCheckpoint`; "tighten" needs one device.
        *args: those of Lightning's strategy.
        **kwargs: those of Lightning's strategy.

    Raises:
        TypeError: an argument is of a wrong kind.
        ValueError: an argument has an impossible value; at the start of fit: no block was found.
        MisconfigurationException: the strategy was told to checkpoint by itself; at the start of
            fit: the device is an XLA one, or `on_oom="tighten"` cannot repeat its batches. (That a
            callback is there too, the callback says, which is asked first.)
        RuntimeError: at the start of fit: the ranks have different plans or models.
    """

    def __init__(
        self,
        *args: Any,
        every_n: int = 1,
        offload: bool | str | OffloadConfig = False,
        layers: Any = None,
        budget: int | float | str | None = None,
        plan: Any = None,
        on_oom: str = "raise",
        **kwargs: Any,
    ) -> None:
        self.fit_plan = FitPlan(every_n, offload, layers, budget, plan, on_oom)
        super().__init__(*args, **kwargs)
        if checkpoints_by_itself(self):
            raise MisconfigurationException(
                f"{type(self).__name__} got an activation_checkpointing_policy and checkpoints "
                "anyway: blocks would be recomputed twice; drop the policy, and say by layers= "
                "which blocks"
            )

    @property
    def handle(self) -> Handle | None:
        """The plan in force, None outside of fit."""
        return self.fit_plan.handle

    @property
    def num_oom(self) -> int:
        """How many out-of-memory errors were met by a tighter plan, in this fit or the last."""
        return self.fit_plan.num_oom

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            assert self.lightning_module is not None
            refuse_xla(trainer)
            self.fit_plan.apply_on_all_ranks(self.lightning_module)
            self.fit_plan.measure(trainer)
            self.fit_plan.survive(trainer)
            self.fit_plan.tell(trainer)  # what they refuse is not told of before
        super().setup(trainer)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        assert self.lightning_module is not None
        self.fit_plan.begin_step(self.lightning_module.trainer, batch)

    @override
    def on_train_end(self) -> None:
        self.fit_plan.end_step()
        super().on_train_end()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.fit_plan.remove()  # a logger that fails now would keep teardown from being called
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self.fit_plan.remove()
        super().teardown()


class PartialCheckpointStrategy(_PartialCheckpointing, SingleDeviceStrategy):
    """Partial checkpointing on one device, the one that the trainer chose.

        Trainer(strategy=PartialCheckpointStrategy(every_n=4))
        Trainer(strategy="partial_checkpoint")

    Args:
        device: another device than the trainer's.
        **kwargs: `every_n`, `offload`, `layers`, `budget`, `plan`, `on_oom` as in
            `PartialCheckpoint`, and all that `SingleDeviceStrategy` takes.

    Raises:
        MisconfigurationException: the trainer has more than one device; and what
            `PartialCheckpoint` raises.
    """

    def __init__(self, device: torch.device | str | int | None = None, **kwargs: Any) -> None:
        super().__init__(device="cpu" if device is None else device, **kwargs)
        self._takes_device = device is None
        self._chosen_device: torch.device | None = None

    @property
    @override
    def root_device(self) -> torch.device:
        return self._chosen_device or super().root_device

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """None: the trainer gives the devices that it chose to whoever has none of its own. (A
        `SingleDeviceStrategy` made from a string would stay on the CPU of a GPU machine.)"""
        return None

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices and len(devices) > 1:
            raise MisconfigurationException(
                f"PartialCheckpointStrategy trains on one device, the trainer has {len(devices)}: "
                "pass devices=1, or strategy='partial_checkpoint_ddp'"
            )
        if devices and self._takes_device:
            self._chosen_device = torch.device(devices[0])

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # Only here may a module build blocks while it trains: other engines have wrapped it.
        assert self.lightning_module is not None
        self.fit_plan.follow(self.lightning_module.trainer)
        super().on_train_batch_start(batch, batch_idx)


class PartialCheckpointDDPStrategy(_PartialCheckpointing, DDPStrategy):
    """Partial checkpointing under `DistributedDataParallel`; needs none of its flags.

        Trainer(strategy=PartialCheckpointDDPStrategy(every_n=4, find_unused_parameters=True))
        Trainer(strategy="partial_checkpoint_ddp")

    Takes `every_n`, `offload`, `layers`, `budget`, `plan` as `PartialCheckpoint` does, and all that
    `DDPStrategy` takes. Raises what `PartialCheckpoint` raises.
    """


class PartialCheckpointFSDPStrategy(_PartialCheckpointing, FSDPStrategy):
    """Partial checkpointing under `FullyShardedDataParallel`: each block inside its unit.

        Trainer(strategy=PartialCheckpointFSDPStrategy(every_n=4, auto_wrap_policy={Block}))
        Trainer(strategy="partial_checkpoint_fsdp")

    Takes `every_n`, `offload`, `layers`, `budget`, `plan` as `PartialCheckpoint` does, and all that
    `FSDPStrategy` takes but `activation_checkpointing_policy`.

    Raises:
        MisconfigurationException: the devices are no CUDA devices; and what `PartialCheckpoint`
            raises.
    """

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices of this node, one for each of its ranks."""
        return super().parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        # Lightning knows the name "fsdp" and its own class by sight; a subclass would get as far
        # as torch, which fails for another reason.
        if devices and torch.device(devices[0]).type != "cuda":
            raise MisconfigurationException(
                f"PartialCheckpointFSDPStrategy needs CUDA devices, the trainer has {devices[0]}: "
                "pass accelerator='gpu', or use strategy='partial_checkpoint_ddp' or "
                "'partial_checkpoint_model_parallel' (FSDP2), which run on CPUs too"
            )
        FSDPStrategy.parallel_devices.fset(self, devices)  # type: ignore[attr-defined]


class PartialCheckpointModelParallelStrategy(_PartialCheckpointing, ModelParallelStrategy):
    """Partial checkpointing with FSDP2 and tensor parallel, as `configure_model` lays them out.

        strategy = PartialCheckpointModelParallelStrategy(
            every_n=4, data_parallel_size=2, tensor_parallel_size=1
        )
        Trainer(strategy=strategy, devices=2)
        Trainer(strategy="partial_checkpoint_model_parallel")

    Takes `every_n`, `offload`, `layers`, `budget`, `plan` as `PartialCheckpoint` does, and all that
    `ModelParallelStrategy` takes. The two sizes multiplied are the number of devices. Raises what
    `PartialCheckpoint` raises.
    """


def _register() -> None:
    names: dict[str, tuple[type[Strategy], dict[str, Any]]] = {
        "partial_checkpoint": (PartialCheckpointStrategy, {}),
        "partial_checkpoint_ddp": (PartialCheckpointDDPStrategy, {}),
        "partial_checkpoint_ddp_find_unused_parameters_true": (
            PartialCheckpointDDPStrategy,
            {"find_unused_parameters": True},
        ),
        "partial_checkpoint_ddp_spawn": (PartialCheckpointDDPStrategy, {"start_method": "spawn"}),
        "partial_checkpoint_fsdp": (PartialCheckpointFSDPStrategy, {}),
        "partial_checkpoint_model_parallel": (PartialCheckpointModelParallelStrategy, {}),
    }
    for name, (strategy, arguments) in names.items():
        if name not in StrategyRegistry:
            StrategyRegistry.register(
                name, strategy, description=(strategy.__doc__ or "").split("\n")[0], **arguments
            )


_register()
