"""The strategies: what Lightning's own of the same kind does, with fewer activations.

Everything that needs two processes runs in one pair of them, started once, since a start is slow;
each case there is a function of the rank, and its error is handed to the test of that case.
"""

from __future__ import annotations

import copy
import os
import pickle
import re
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers import DIM, MlpBlock, Stack, assert_same, batch, executions, seed_all
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    StrategyRegistry,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lit_helpers import (
    LIGHTNING_WARNS,
    NAMES,
    LateLit,
    Lit,
    NormBlock,
    Recorder,
    SetupLit,
    assert_plain,
    join_pair,
    leftovers,
    loader,
    trainer_of,
)
from test_partial_checkpoint import DDP_CASES
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader

from lightning_ckpt import (
    PartialCheckpoint,
    PartialCheckpointDDPStrategy,
    PartialCheckpointFSDPStrategy,
    PartialCheckpointModelParallelStrategy,
    PartialCheckpointStrategy,
    apply_partial_checkpoint,
)
from lightning_ckpt.core import swap

pytestmark = LIGHTNING_WARNS

STEPS = 5


def train(
    strategy: Any, model: L.LightningModule, *callbacks: Callback, **options: Any
) -> list[list[int]]:
    """Fit and return how often each block ran in each batch."""
    recorder = Recorder()
    defaults = {"max_epochs": 1, "log_every_n_steps": 1}
    trainer = trainer_of(*callbacks, recorder, strategy=strategy, **(defaults | options))
    trainer.fit(model, loader(STEPS * trainer.world_size))
    return recorder.batches


def plain_values(value: Any) -> Any:
    """Nested values with whole tensors in place of sharded ones (every rank must ask)."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: plain_values(item) for key, item in value.items()}
    return [plain_values(v) for v in value] if isinstance(value, list | tuple) else value


# --- one device


@pytest.mark.parametrize("factory", [Lit, LateLit, SetupLit], ids=lambda f: f.__name__)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_one_device(factory: Callable[[], Lit], precision: str) -> None:
    """Weights, buffers, optimizer and keys as with Lightning's strategy, blocks run twice."""
    results = []
    for strategy in (PartialCheckpointStrategy(every_n=2), SingleDeviceStrategy()):
        seed_all(0)
        model, recorder = factory(), Recorder()
        trainer = trainer_of(recorder, strategy=strategy, precision=precision)
        trainer.fit(model, loader(STEPS), loader(1))
        assert_plain(model)
        results.append((leftovers(model), recorder.losses, recorder.keys, recorder.batches))
    (*ours, counts), (*plain, plain_counts) = results
    assert_same(ours, plain)
    assert counts == [[2, 1, 2, 1]] * 2 * STEPS
    assert plain_counts == [[1, 1, 1, 1]] * 2 * STEPS


def test_plan_is_shown_and_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the callback does."""
    strategy = PartialCheckpointStrategy(every_n=2)
    train(strategy, Lit(), logger=CSVLogger(tmp_path))
    assert "2 of 4" in capsys.readouterr().out
    assert "every_n: 2" in next(tmp_path.rglob("hparams.yaml")).read_text()


class Watcher(Callback):
    """Notes the strategy's plan when training starts and in the other loops."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def _note(self, name: str, trainer: Any) -> None:
        self.seen[name] = trainer.strategy.handle and trainer.strategy.handle.plan.recomputed

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._note("fit", trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._note("validate", trainer)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        self._note("test", trainer)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        self._note("predict", trainer)


def test_idle_in_other_loops_and_again_in_a_second_fit() -> None:
    """Report I1, I4: validate, fit, test, predict, fit of another module; one trainer."""
    watcher = Watcher()
    trainer = trainer_of(watcher, strategy=PartialCheckpointStrategy(every_n=2), max_epochs=1)
    model = Lit()
    trainer.validate(model, loader(1), verbose=False)
    trainer.test(model, loader(1), verbose=False)
    trainer.predict(model, loader(1), return_predictions=False)
    assert watcher.seen == {"validate": None, "test": None, "predict": None}
    for each in (model, Lit()):
        watcher.seen.clear()
        trainer.fit_loop.epoch_progress.reset()
        trainer.fit(each, loader(1))
        assert watcher.seen == {"fit": ("net.layers.0", "net.layers.2")}
        assert trainer.strategy.handle is None  # type: ignore[attr-defined]
        assert_plain(each)


class Raising(Lit):
    """Fails in the middle of an epoch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            raise KeyError("no such batch")
        return super().training_step(batch, batch_idx)


class BadLogger(CSVLogger):
    """Fails when the run has failed, and so keeps Lightning from tearing down."""

    def finalize(self, status: str) -> None:
        raise OSError("disk full")


@pytest.mark.parametrize("logger", [False, BadLogger], ids=["alone", "logger fails too"])
def test_model_is_restored_after_an_exception(logger: Any, tmp_path: Path) -> None:
    model = Raising()
    with pytest.raises((KeyError, OSError)):
        train(PartialCheckpointStrategy(), model, logger=logger and logger(tmp_path))
    assert_plain(model)


@pytest.mark.parametrize("to_ours", [True, False])
def test_checkpoints_load_both_ways(to_ours: bool, tmp_path: Path) -> None:
    """Report I3: weights and optimizer go from one strategy to the other."""
    results = []
    for first_is_ours in (True, False):
        seed_all(0)
        first, second = Lit(), Lit()
        path = tmp_path / f"{first_is_ours}.ckpt"
        strategy = PartialCheckpointStrategy() if first_is_ours else SingleDeviceStrategy()
        trainer = trainer_of(strategy=strategy, max_epochs=1)
        trainer.fit(first, loader())
        trainer.save_checkpoint(path)
        strategy = PartialCheckpointStrategy() if to_ours else SingleDeviceStrategy()
        seed_all(1)
        trainer_of(strategy=strategy, max_epochs=2).fit(second, loader(), ckpt_path=path)
        results.append(leftovers(second))
    assert_same(*results)


@pytest.mark.parametrize("name", ["deepcopy", "pickle"])
def test_copies_of_a_strategy(name: str) -> None:
    """Report A16: before fit, and of one whose plan is in force."""
    copied = {"deepcopy": copy.deepcopy, "pickle": lambda s: pickle.loads(pickle.dumps(s))}[name]
    strategy = PartialCheckpointDDPStrategy(every_n=3, layers="net.*", static_graph=True)
    model = Lit()
    assert copied(strategy).fit_plan.every_n == 3
    strategy.fit_plan.apply(model)
    again = copied(strategy)
    assert again.handle is None
    assert again.fit_plan.layers == "net.*"
    strategy.fit_plan.remove()
    assert_plain(model)


def test_device_that_the_trainer_chose() -> None:
    """No argument is needed, one that is given rules; nothing is asked of the device here."""
    chosen = [torch.device("cuda", 3)]
    for strategy in (PartialCheckpointStrategy(), StrategyRegistry.get("partial_checkpoint")):
        assert strategy.root_device == torch.device("cpu")
        strategy.parallel_devices = chosen
        assert strategy.root_device == chosen[0]
    given = PartialCheckpointStrategy("cuda:1")
    given.parallel_devices = chosen
    assert given.root_device == torch.device("cuda:1")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "strategy",
    ["partial_checkpoint", "partial_checkpoint_ddp", partial(PartialCheckpointFSDPStrategy)],
    ids=["one", "ddp", "fsdp"],
)
def test_on_a_gpu(strategy: Any) -> None:
    """It trains there, and recomputes; FSDP with a unit for each block."""
    if callable(strategy):
        strategy = strategy(auto_wrap_policy={NormBlock}, every_n=2)
    model = Lit()
    counts = train(strategy, model, accelerator="gpu")
    assert counts == [[2, 1, 2, 1] if not isinstance(strategy, str) else [2] * 4] * STEPS
    assert_plain(model)


# --- torch.compile


class TanhBlock(MlpBlock):
    """Without dropout, which a compiler may draw in another order."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)


class CompiledLit(Lit):
    """Says where it is compiled: as a whole, or each block; at once, or in `configure_model`."""

    def __init__(self, what: str, when: str, backend: Any) -> None:
        super().__init__(TanhBlock)
        self._todo: Callable[[], None] | None = partial(COMPILE[what], self, backend)
        if when == "before":
            self.configure_model()

    def configure_model(self) -> None:
        if self._todo is not None:
            self._todo()
        self._todo = None


def _compile_whole(model: Any, backend: Any) -> None:
    model.net.compile(backend=backend, fullgraph=True)


def _compile_blocks(model: Any, backend: Any) -> None:
    for layer in model.net.layers:
        layer.compile(backend=backend, fullgraph=True)


def _wrap_whole(model: Any, backend: Any) -> None:
    model.net = torch.compile(model.net, backend=backend, fullgraph=True)


def _wrap_blocks(model: Any, backend: Any) -> None:
    for index, layer in enumerate(model.net.layers):
        model.net.layers[index] = torch.compile(layer, backend=backend, fullgraph=True)


COMPILE = {
    "whole": _compile_whole,
    "blocks": _compile_blocks,
    "whole, wrapped": _wrap_whole,
    "blocks, wrapped": _wrap_blocks,
}


class SavedBytes(Callback):
    """Bytes that autograd keeps over a step, and the losses."""

    def __init__(self) -> None:
        self.saved: list[int] = []
        self.losses: list[Tensor] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self._storages: dict[int, int] = {}
        self._alive: list[Tensor] = []  # so that no storage takes the place of another
        self._context = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t)
        self._context.__enter__()

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage.nbytes()
        self._alive.append(tensor)
        return tensor

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self._context.__exit__(None, None, None)
        self.saved.append(sum(self._storages.values()))
        self.losses.append(loss.detach().clone())
        self._alive.clear()

    def on_exception(self, *args: Any) -> None:
        self._context.__exit__(None, None, None)


def compiled_run(
    strategy: Any, what: str, when: str, lit: bool, kind: Callable[..., Lit]
) -> tuple[list[int], list[Tensor], dict[str, Any], CompileCounterWithBackend]:
    torch._dynamo.reset()
    seed_all(0)
    backend, watched = CompileCounterWithBackend("aot_eager"), SavedBytes()
    model: Any = kind(what, when, backend) if not lit else Lit(TanhBlock)
    trainer = trainer_of(watched, strategy=strategy, max_epochs=1, devices=_world())
    compiled = torch.compile(model, backend=backend) if lit else model
    torch._dynamo.utils.counters.clear()
    trainer.fit(compiled, loader(2 * _world()))
    assert not torch._dynamo.utils.counters["graph_break"]
    state = {key: plain_values(value).clone() for key, value in model.state_dict().items()}
    return watched.saved, watched.losses, state, backend


def check_compiled(
    ours: Any,
    plain: Any,
    what: str,
    when: str,
    lit: bool = False,
    kind: Callable[..., Lit] = CompiledLit,
) -> None:
    """No graph break, checkpoint regions in the graphs, equal results, fewer saved bytes."""
    saved, losses, state, backend = compiled_run(ours, what, when, lit, kind)
    run = compiled_run(plain, what, when, lit, kind)
    plain_saved, plain_losses, plain_state, plain_backend = run
    assert 0 < backend.frame_count <= plain_backend.frame_count
    regions = sum(
        "checkpoint" in str(node.target)
        for graph in backend.graphs
        for node in graph.graph.nodes
        if node.op == "call_function"
    )
    assert regions > 0, "no block is checkpointed in the graphs"
    assert_same((losses, state), (plain_losses, plain_state))
    assert all(a < b for a, b in zip(saved, plain_saved, strict=True)), (saved, plain_saved)


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


COMPILER_WORDS = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch.*",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)


@COMPILER_WORDS
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("when", ["before", "configure_model"])
@pytest.mark.parametrize("what", COMPILE)
def test_compiled(what: str, when: str) -> None:
    """Report A15, H7: before, or inside, `configure_model`, whole or block by block."""
    check_compiled(PartialCheckpointStrategy(), SingleDeviceStrategy(), what, when)


@COMPILER_WORDS
@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_lightning_module() -> None:
    """`trainer.fit(torch.compile(module))`."""
    check_compiled(PartialCheckpointStrategy(), SingleDeviceStrategy(), "", "", lit=True)


# --- two processes


def compare_strategies(
    ours: Callable[..., Any],
    plain: Callable[..., Any],
    model: Callable[[], Lit],
    glances: int = 0,
    **options: Any,
) -> None:
    """Five steps with each from one seed: equal leftovers, and blocks 0 and 2 ran twice but for
    `glances`, passes without gradients."""
    results = []
    for strategy in (ours(every_n=2), plain()):
        seed_all(0)
        lit = model()
        lit.configure_model()  # so that blocks can be counted; it does nothing when asked again
        trainer = trainer_of(strategy=strategy, max_epochs=1, devices=2, **options)
        seed_all(10 + dist.get_rank())  # dropout differs by rank
        with executions(lit, NAMES) as counts:
            trainer.fit(lit, loader(2 * STEPS))
        assert_plain_classes(lit)
        results.append((plain_values(leftovers(lit)), [counts[name] for name in NAMES]))
    (after, counted), (plain_after, plain_counted) = results
    assert_same(after, plain_after)
    again = [(n - glances) * (1, 0)[i % 2] for i, n in enumerate(plain_counted)]
    assert counted == [n + more for n, more in zip(plain_counted, again, strict=True)], counted
    assert sum(again) > 0


def assert_plain_classes(model: nn.Module) -> None:
    for module in model.modules():
        assert not any(c.__name__ == "_Checkpointed" for c in type(module).__mro__)


DDP = partial(DDPStrategy, process_group_backend="gloo")
OUR_DDP = partial(PartialCheckpointDDPStrategy, process_group_backend="gloo")


def _ddp(case: str) -> None:
    factory, flags, options = DDP_CASES[case]
    compare_strategies(partial(OUR_DDP, **flags), partial(DDP, **flags), factory, **options)


class FrozenLit(Lit):
    """The stem and the first blocks are frozen, as with an adapter at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.net.stem.requires_grad_(False)
        self.net.layers[:2].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.requires_grad_())


class OneRankSkips(Lit):
    """A block that is not used on the second rank, in any step or in some."""

    def __init__(self, every: int = 1) -> None:
        super().__init__()
        self.every = every

    def forward(self, x: Tensor) -> Tensor:
        x = self.net.stem(x)
        for index, layer in enumerate(self.net.layers):
            if index == 2 and self.global_rank == 1 and self.global_step % self.every == 0:
                continue
            x = layer(x)
        return self.net.head(x)


def _ddp_comm_hook() -> None:
    hook = {"ddp_comm_hook": fp16_compress_hook}
    compare_strategies(partial(OUR_DDP, **hook), partial(DDP, **hook), Lit)


def _ddp_frozen_part() -> None:
    compare_strategies(OUR_DDP, DDP, FrozenLit)


def _ddp_unused_on_one_rank(every: int) -> None:
    flag = {"find_unused_parameters": True}
    model = partial(OneRankSkips, every)
    compare_strategies(partial(OUR_DDP, **flag), partial(DDP, **flag), model)


class GlancingLit(Lit):
    """A pass without gradients before the real one, as teachers and recycling do it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = x + self.net(x)
        return self.net(x)


def _ddp_averages() -> None:
    """Report H5: averaging callbacks beside the strategy."""
    for make in (
        partial(EMAWeightAveraging, decay=0.5),
        partial(StochasticWeightAveraging, swa_lrs=1e-2, swa_epoch_start=1),
    ):
        after = []
        for strategy in (OUR_DDP(), DDP()):
            seed_all(0)
            model = Lit(MlpBlock)
            trainer = trainer_of(make(), strategy=strategy, devices=2, max_epochs=3)
            trainer.fit(model, loader(2 * STEPS), loader(2))
            assert_plain(model)
            after.append(leftovers(model))
        assert_same(*after)


def _ddp_static_accumulation() -> None:
    """Pitfall 18: torch 2.13 fails here without us too; in any case the outcome is the same."""
    outcomes = []
    for strategy in (OUR_DDP(static_graph=True), DDP(static_graph=True)):
        seed_all(0)
        model = Lit()
        trainer = trainer_of(strategy=strategy, devices=2, max_epochs=1, accumulate_grad_batches=2)
        try:
            trainer.fit(model, loader(2 * STEPS))
            outcomes.append(leftovers(model))
        except RuntimeError as error:
            outcomes.append(str(error))
        assert_plain(model)
    assert_same(*outcomes)


def _ddp_loops() -> None:
    """Report I1, I4, I6: validate, fit, test, fit again, another module; one trainer."""
    after = []
    for strategy in (OUR_DDP(every_n=2), DDP()):
        seed_all(0)
        models, recorder = [Lit(), Lit(MlpBlock)], Recorder()
        trainer = trainer_of(recorder, strategy=strategy, devices=2, max_epochs=1)
        trainer.validate(models[0], loader(2), verbose=False)
        trainer.fit(models[0], loader(4), loader(2))
        trainer.test(models[0], loader(2), verbose=False)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(models[0], loader(4))
        trainer.fit_loop.epoch_progress.reset()
        trainer.fit(models[1], loader(4))
        for model in models:
            assert_plain(model)
        expected = [2, 1, 2, 1] if isinstance(strategy, PartialCheckpointDDPStrategy) else [1] * 4
        assert recorder.batches == [expected] * 8
        after.append([leftovers(models[1]), dict(models[0].state_dict())])
    assert_same(*after)


def _ddp_precision(precision: Any) -> None:
    compare_strategies(OUR_DDP, DDP, Lit, precision=precision)


def _ddp_budget() -> None:
    from test_budget_in_fit import two_ranks

    two_ranks()


def _ddp_buckets() -> None:
    from test_budget_in_fit import two_ranks_with_buckets

    two_ranks_with_buckets()


def _ddp_lengths() -> None:
    from test_lengths_in_fit import lengths_on_two_ranks

    lengths_on_two_ranks()


def _ddp_unlike_batches() -> None:
    from test_lengths_in_fit import unlike_batches_on_two_ranks

    unlike_batches_on_two_ranks()


def _ddp_crossed_batches() -> None:
    from test_lengths_in_fit import crossed_batches_on_two_ranks

    crossed_batches_on_two_ranks()


def _ddp_budget_with_offload() -> None:
    from test_budget_with_offload import two_ranks

    two_ranks()


def _ddp_string() -> None:
    """A name is enough; without arguments every block is checkpointed."""
    trainer = trainer_of(strategy="partial_checkpoint_ddp", devices=2, max_epochs=1)
    model = Lit()
    with executions(model, NAMES) as counts:
        trainer.fit(model, loader(2 * STEPS))
    assert [counts[name] for name in NAMES] == [2 * STEPS] * 4
    assert_plain(model)


def _ddp_compiled(what: str, when: str, lit: bool = False) -> None:
    # Buckets so small that the compiler's DDP optimizer splits the graphs.
    few: dict[str, Any] = {"bucket_cap_mb": 0.001}
    first_bucket, dist._DEFAULT_FIRST_BUCKET_BYTES = dist._DEFAULT_FIRST_BUCKET_BYTES, 512
    try:
        check_compiled(OUR_DDP(**few), DDP(**few), what, when, lit)
    finally:
        dist._DEFAULT_FIRST_BUCKET_BYTES = first_bucket


# FSDP2 and tensor parallel


class ShardedLit(LateLit):
    """Each block is a unit of FSDP2, and the network around them."""

    block: type[nn.Module] = NormBlock

    def configure_model(self) -> None:
        if self.net is not None:
            return
        seed_all(0)
        self.net = Stack(self.block, 4)
        if dist.is_initialized() and self._device_mesh is not None:
            self.lay_out()

    def lay_out(self) -> None:
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        for layer in self.net.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # foreach: not with tensors of several kinds
        return torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=False)


class FrozenShardedLit(ShardedLit):
    """LoRA-like: two blocks are frozen."""

    def lay_out(self) -> None:
        self.net.layers[:2].requires_grad_(False)
        super().lay_out()


class InnerUnitsLit(FrozenShardedLit):
    """Each linear layer is a unit of its own inside the block; some are frozen."""

    def lay_out(self) -> None:
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        for layer in self.net.layers:
            layer.up.requires_grad_(False)
            fully_shard(layer.up, mesh=mesh)
            fully_shard(layer.down, mesh=mesh)
        super().lay_out()


class PolicyLit(ShardedLit):
    """FSDP2's own mixed precision: the hook of each unit casts its input."""

    block = MlpBlock  # BatchNorm does not run so on a CPU

    def lay_out(self) -> None:
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in self.net.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.net, mesh=mesh, mp_policy=policy)


class TwiceShardedLit(ShardedLit):
    """Each block is used twice in a step."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.net(x))


class CompiledShardedLit(CompiledLit):
    """Each block is compiled, then sharded, in `configure_model`. (Torch cannot compile across the
    hooks of FSDP2: the whole network would be one piece for each block as well.)"""

    def configure_model(self) -> None:
        if self._todo is None:
            return
        super().configure_model()
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        for layer in self.net.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    configure_optimizers = ShardedLit.configure_optimizers


class TensorParallelLit(ShardedLit):
    """The two linear layers of each block are split by columns and by rows."""

    def lay_out(self) -> None:
        parts = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], parts)  # type: ignore[index]


class BothParallelLit(TensorParallelLit):
    """Both, with a data-parallel size of one."""

    def lay_out(self) -> None:
        super().lay_out()
        ShardedLit.lay_out(self)


FSDP2 = partial(ModelParallelStrategy, data_parallel_size=2, tensor_parallel_size=1)
OUR_FSDP2 = partial(
    PartialCheckpointModelParallelStrategy, data_parallel_size=2, tensor_parallel_size=1
)
TP = {"data_parallel_size": 1, "tensor_parallel_size": 2}


class Observed(Callback):
    """Counts the blocks of a model that is made in `configure_model`; its keys during fit."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._context = executions(pl_module, NAMES)
        self.counts = self._context.__enter__()
        self.num_hook_calls = self.num_whole = 0
        pl_module.net.layers[0].register_forward_pre_hook(self._count)
        self.names = [n for n, _ in pl_module.named_parameters()] + list(pl_module.state_dict())

    def _count(self, *args: Any) -> None:
        self.num_hook_calls += 1

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        parameters = [p for p in pl_module.parameters() if not isinstance(p, DTensor)]
        self.num_whole = max(self.num_whole, len(parameters))  # left gathered by a recompute

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._context.__exit__(None, None, None)


def sharded_run(strategy: Any, model: Lit, **options: Any) -> tuple[Any, list[int]]:
    observed = Observed()
    options = {"max_epochs": 1, "devices": 2} | options
    trainer = trainer_of(observed, strategy=strategy, **options)
    seed_all(10 + dist.get_rank())
    trainer.fit(model, loader(2 * STEPS))
    assert_plain_classes(model)
    left = plain_values(leftovers(model))
    counts = [observed.counts[name] for name in NAMES]
    return [left, observed.names, observed.num_hook_calls, observed.num_whole], counts


def _fsdp2(model: Callable[[], Lit], shape: dict[str, int], **options: Any) -> None:
    ours, counts = sharded_run(OUR_FSDP2(every_n=2, **shape), model(), **options)
    plain, plain_counts = sharded_run(FSDP2(**shape), model(), **options)
    assert_same(ours, plain)
    assert min(plain_counts) > 0
    assert counts == [n * (2, 1)[i % 2] for i, n in enumerate(plain_counts)], counts


def _fsdp2_compiled() -> None:
    check_compiled(OUR_FSDP2(), FSDP2(), "blocks", "configure_model", kind=CompiledShardedLit)


def _fsdp2_lengths() -> None:
    """Plans follow the batches inside of FSDP2's units, and no class is made for it again and
    again; the training is that of plain FSDP2."""
    rows = [[8, 300, 40, 120, 80, 30, 300, 8, 300, 60], [20, 30, 200, 60, 40, 300, 8, 9, 300, 8]]
    make = torch.Generator().manual_seed(dist.get_rank())
    data = [torch.randn(n, DIM, generator=make) for n in rows[dist.get_rank()]]
    num_made: list[int] = []

    class Counting(Recorder):
        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            num_made.append(making.call_count)

    after = []
    for strategy in (OUR_FSDP2(budget=180_000), FSDP2()):
        seed_all(0)
        model, recorder = ShardedLit(), Counting()
        options = {"strategy": strategy, "devices": 2, "max_epochs": 1}
        trainer = trainer_of(recorder, use_distributed_sampler=False, **options)
        with mock.patch.object(swap, "_new_class", wraps=swap._new_class) as making:
            trainer.fit(model, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
        after.append(leftovers(model))
        if not isinstance(strategy, PartialCheckpointModelParallelStrategy):
            continue
        batches = recorder.batches
        found: list[Any] = [None, None]
        dist.all_gather_object(found, batches)
        assert found[0] == found[1]
        assert batches[0] == [2] * 4
        assert [1] * 4 in batches
        assert sum(batches[-2]) > 4, "300 rows do not fit"
        assert num_made[-4:] == num_made[-1:] * 4
    assert_same(*after)


def _fsdp2_callback() -> None:
    """The callback comes later, and does the same."""
    observed, model = Observed(), ShardedLit()
    trainer = trainer_of(PartialCheckpoint(), observed, strategy=FSDP2(), max_epochs=1, devices=2)
    trainer.fit(model, loader(2))
    assert [observed.counts[name] for name in NAMES] == [2] * 4
    assert_plain_classes(model)


def _fsdp2_checkpoints(
    whole: bool, folder: str, factory: Callable[[], Lit] = ShardedLit, **shape: int
) -> None:
    """A file, or folder of shards, of either strategy goes on in either."""
    kinds = {"ours": OUR_FSDP2, "plain": FSDP2}
    keep = {"save_distributed_checkpoint": not whole, **shape}
    paths, after = {}, {}
    for name, kind in kinds.items():
        trainer = trainer_of(strategy=kind(**keep), max_epochs=1, devices=2)
        trainer.fit(factory(), loader(2 * STEPS))
        paths[name] = f"{folder}/{name}-{whole}-{factory.__name__}.ckpt"
        trainer.save_checkpoint(paths[name])
    for first, path in paths.items():
        for then, kind in kinds.items():
            model = factory()
            trainer = trainer_of(strategy=kind(**keep), max_epochs=2, devices=2)
            seed_all(20)
            trainer.fit(model, loader(2 * STEPS), ckpt_path=path)
            after[first, then] = plain_values(leftovers(model))
    assert Path(paths["ours"]).is_dir() is not whole
    for pair, state in after.items():
        assert_same(state, after["plain", "plain"], str(pair))


def _ddp_checkpoints(folder: str) -> None:
    after = {}
    for first, kind in {"ours": OUR_DDP, "plain": DDP}.items():
        seed_all(0)
        trainer = trainer_of(strategy=kind(), max_epochs=1, devices=2)
        trainer.fit(Lit(), loader(2 * STEPS))
        trainer.save_checkpoint(f"{folder}/{first}-ddp.ckpt")
        for then, other in {"ours": OUR_DDP, "plain": DDP}.items():
            model = Lit()
            trainer = trainer_of(strategy=other(), max_epochs=2, devices=2)
            seed_all(20)
            trainer.fit(model, loader(2 * STEPS), ckpt_path=f"{folder}/{first}-ddp.ckpt")
            after[first, then] = leftovers(model)
    for pair, state in after.items():
        assert_same(state, after["plain", "plain"], str(pair))


# FSDP1: Lightning's strategy wants CUDA, torch's class does not


def _fsdp1(use_orig_params: bool, wrapped_first: bool = False) -> None:
    """Torch's own wrapper around a model in which a plan is in force, or the other way round."""
    results = []
    for checkpointed in (True, False):
        seed_all(0)
        model = Stack(NormBlock, 4)
        context = executions(model, [f"layers.{i}" for i in range(4)])
        counts = context.__enter__()
        handle = None
        if checkpointed and not wrapped_first:
            handle = apply_partial_checkpoint(model, every_n=2)
        wrapped = _wrap_fsdp1(model, use_orig_params=use_orig_params)
        if checkpointed and wrapped_first:
            handle = apply_partial_checkpoint(wrapped, every_n=2)
            assert handle.plan.blocks[0].class_name == "NormBlock", "inside the unit"
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-1)
        seed_all(10 + dist.get_rank())
        losses = []
        for index in range(STEPS):
            loss = wrapped(batch(2 * index + dist.get_rank())).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        state = {key: value.clone() for key, value in wrapped.state_dict().items()}
        results.append((losses, state, [counts[f"layers.{i}"] for i in range(4)]))
        context.__exit__(None, None, None)
        if handle is not None:
            handle.remove()
        assert_plain_classes(wrapped)
    (*ours, counted), (*plain, plain_counted) = results
    assert_same(ours, plain)
    assert plain_counted == [STEPS] * 4
    assert counted == [2 * STEPS, STEPS] * 2, counted


def _wrap_fsdp1(model: nn.Module, **options: Any) -> FullyShardedDataParallel:
    defaults = {"auto_wrap_policy": ModuleWrapPolicy({NormBlock}), "device_id": torch.device("cpu")}
    return FullyShardedDataParallel(model, **(defaults | options))


class OnCPU:
    """Lets one of the FSDP strategies run without CUDA: its devices, and its call of torch."""

    parallel_devices: Any = None

    def _setup_model(self, model: nn.Module) -> nn.Module:
        assert getattr(self, "handle", True), "the plan comes before the wrap"
        strategy: Any = self
        return _wrap_fsdp1(
            model, mixed_precision=strategy.mixed_precision_config, **strategy.kwargs
        )


class CPUFSDPStrategy(OnCPU, FSDPStrategy):
    pass


class OurCPUFSDPStrategy(OnCPU, PartialCheckpointFSDPStrategy):
    pass


class FlatLit(Lit):
    """An optimizer over what FSDP made of the parameters."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.trainer.model.parameters(), lr=1e-2)  # type: ignore[union-attr]


class MlpFlatLit(FlatLit):
    """Without BatchNorm, which does not run in bfloat16 on a CPU."""

    def __init__(self) -> None:
        super().__init__(MlpBlock)


class FrozenFlatLit(FlatLit):
    """Some layers in each block, and one block, are frozen."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.net.layers:
            layer.up.requires_grad_(False)
        self.net.layers[1].requires_grad_(False)


class TwiceFlatLit(FlatLit):
    """Each block is used twice in a step."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.net(x))


def _fsdp1_strategy(
    use_orig_params: bool,
    factory: Callable[[], Lit] = FlatLit,
    units: Any = NormBlock,
    runs: int = 1,
    **options: Any,
) -> None:
    """All of the strategy but for the device: same keys and weights in the whole state."""
    results = []
    policy = ModuleWrapPolicy({units})
    for kind in (partial(OurCPUFSDPStrategy, every_n=2), CPUFSDPStrategy):
        seed_all(0)
        model = factory()
        strategy = kind(use_orig_params=use_orig_params, auto_wrap_policy=policy)
        trainer = trainer_of(strategy=strategy, devices=2, max_epochs=1, **options)
        seed_all(10 + dist.get_rank())
        with executions(model, NAMES) as counts:
            trainer.fit(model, loader(2 * STEPS))
        # Not by the strategy's gathering to rank 0, which crashes on a CPU (Lightning's own too).
        state = dict(strategy.model.state_dict())
        assert_plain_classes(model)
        results.append((state, [counts[name] for name in NAMES]))
    (state, counted), (plain_state, plain_counted) = results
    assert_same(state, plain_state)
    assert plain_counted == [runs * STEPS] * 4
    assert counted == [2 * runs * STEPS, runs * STEPS] * 2, counted


def _fsdp1_callback() -> None:
    """The callback looks again when each rank has its own piece of the parameters."""
    model = FlatLit()
    strategy = CPUFSDPStrategy(use_orig_params=True)
    trainer = trainer_of(PartialCheckpoint(), strategy=strategy, devices=2, max_epochs=1)
    with executions(model, NAMES) as counts:
        trainer.fit(model, loader(2 * STEPS))
    assert [counts[name] for name in NAMES] == [2 * STEPS] * 4
    assert_plain_classes(model)


def _fsdp1_compiled(what: str, when: str) -> None:
    policy = {"use_orig_params": True, "auto_wrap_policy": ModuleWrapPolicy({TanhBlock})}
    check_compiled(OurCPUFSDPStrategy(**policy), CPUFSDPStrategy(**policy), what, when)


# Ranks that disagree


class UnevenLit(Lit):
    """On the second rank it has other blocks, or other widths."""

    def __init__(self, num_blocks: int, width: int) -> None:
        super().__init__(partial(MlpBlock, dropout=0.0))
        self.net = Stack(partial(UnevenBlock, width), num_blocks)


class UnevenBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, width), nn.Linear(width, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x))


class Complaint(Exception):
    """A user's predicate fails."""


def _complains(name: str, module: nn.Module) -> bool:
    raise Complaint("of my own")


def _disagree(
    words: list[str],
    model: tuple[int, int] = (4, 8),
    adapter: str = "strategy",
    own_error: str = "",
    **arguments: Any,
) -> None:
    """`model` and `arguments` are those of the second rank, which may fail on its own."""
    is_second = dist.get_rank() == 1
    lit = UnevenLit(*(model if is_second else (4, 8)))
    if not is_second:
        arguments = {}
    ours: list[Callback] = [PartialCheckpoint(**arguments)] if adapter == "callback" else []
    strategy = DDP() if ours else OUR_DDP(**arguments)
    began = time.monotonic()
    with pytest.raises((RuntimeError, ValueError, Complaint)) as caught:
        trainer_of(*ours, strategy=strategy, devices=2, max_epochs=1).fit(lit, loader(4))
    assert time.monotonic() - began < TIME_OUT / 2, "it waited"
    for word in [own_error] if is_second and own_error else words:
        assert word in str(caught.value)
    assert_plain_classes(lit)


def _disagree_sharded(kind: Callable[..., Any], factory: Callable[[], Lit]) -> None:
    """Under the engines that shard."""
    model, every_n = factory(), 1 + dist.get_rank()
    with pytest.raises(RuntimeError, match=r"rank 0 has block .*: recompute, rank 1 .*: keep"):
        trainer_of(strategy=kind(every_n=every_n), devices=2).fit(model, loader(4))
    assert_plain_classes(model)


TIME_OUT = 30  # seconds that one process waits for the other
CASES: dict[str, Callable[..., None]] = {
    **{f"ddp: {case}": partial(_ddp, case) for case in DDP_CASES},
    "ddp: string": _ddp_string,
    "ddp: budget": _ddp_budget,
    "ddp: budget and buckets": _ddp_buckets,
    "ddp: lengths": _ddp_lengths,
    "ddp: unlike batches": _ddp_unlike_batches,
    "ddp: crossed batches": _ddp_crossed_batches,
    "ddp: budget with offload": _ddp_budget_with_offload,
    "ddp: comm hook": _ddp_comm_hook,
    "ddp: frozen part": _ddp_frozen_part,
    "ddp: unused on one rank": partial(_ddp_unused_on_one_rank, 1),
    "ddp: unused on one rank in some steps": partial(_ddp_unused_on_one_rank, 2),
    "ddp: clipping": partial(compare_strategies, OUR_DDP, DDP, Lit, gradient_clip_val=0.01),
    "ddp: static_graph, accumulation": _ddp_static_accumulation,
    "ddp: passes without gradients": partial(
        compare_strategies, OUR_DDP, DDP, GlancingLit, glances=STEPS
    ),
    "ddp: averages": _ddp_averages,
    "ddp: one trainer, several loops": _ddp_loops,
    "ddp: bf16-mixed": partial(_ddp_precision, "bf16-mixed"),
    "ddp: bf16-true": partial(_ddp_precision, "bf16-true"),
    "ddp: compiled whole, before": partial(_ddp_compiled, "whole", "before"),
    "ddp: compiled blocks, in configure_model": partial(_ddp_compiled, "blocks", "configure_model"),
    "ddp: compiled LightningModule": partial(_ddp_compiled, "", "", lit=True),
    "fsdp2: plain": partial(_fsdp2, ShardedLit, {}),
    "fsdp2: bf16-mixed": partial(_fsdp2, ShardedLit, {}, precision="bf16-mixed"),
    "fsdp2: bf16-true": partial(_fsdp2, ShardedLit, {}, precision="bf16-true"),
    "fsdp2: accumulation": partial(_fsdp2, ShardedLit, {}, accumulate_grad_batches=2),
    "fsdp2: frozen part": partial(_fsdp2, FrozenShardedLit, {}),
    "fsdp2: clipping": partial(_fsdp2, ShardedLit, {}, gradient_clip_val=0.01),
    "fsdp2: units inside blocks": partial(_fsdp2, InnerUnitsLit, {}),
    "fsdp2: mixed precision policy": partial(_fsdp2, PolicyLit, {}),
    "fsdp2: blocks used twice": partial(_fsdp2, TwiceShardedLit, {}),
    "fsdp2: compiled blocks": _fsdp2_compiled,
    "fsdp2: callback": _fsdp2_callback,
    "fsdp2: lengths": _fsdp2_lengths,
    "tensor parallel": partial(_fsdp2, TensorParallelLit, TP),
    "tensor parallel: bf16-mixed": partial(_fsdp2, TensorParallelLit, TP, precision="bf16-mixed"),
    "tensor parallel: bf16-true": partial(_fsdp2, TensorParallelLit, TP, precision="bf16-true"),
    "tensor parallel: accumulation": partial(
        _fsdp2, TensorParallelLit, TP, accumulate_grad_batches=2
    ),
    "tensor parallel in fsdp2": partial(_fsdp2, BothParallelLit, TP),
    "fsdp1: original parameters": partial(_fsdp1, True),
    "fsdp1: flat parameters": partial(_fsdp1, False),
    "fsdp1: applied after the wrap": partial(_fsdp1, True, wrapped_first=True),
    "fsdp1: strategy, original parameters": partial(_fsdp1_strategy, True),
    "fsdp1: strategy, flat parameters": partial(_fsdp1_strategy, False),
    # Torch makes a unit of each BatchNorm then.
    "fsdp1: strategy, bf16-mixed": partial(_fsdp1_strategy, True, precision="bf16-mixed"),
    "fsdp1: strategy, bf16-true": partial(
        _fsdp1_strategy, True, MlpFlatLit, MlpBlock, precision="bf16-true"
    ),
    "fsdp1: strategy, accumulation": partial(_fsdp1_strategy, True, accumulate_grad_batches=2),
    "fsdp1: strategy, clipping": partial(
        _fsdp1_strategy, True, gradient_clip_val=0.01, gradient_clip_algorithm="value"
    ),
    "fsdp1: strategy, frozen part": partial(_fsdp1_strategy, True, FrozenFlatLit),
    "fsdp1: strategy, units inside blocks": partial(
        _fsdp1_strategy, True, FrozenFlatLit, units=nn.Linear
    ),
    "fsdp1: strategy, blocks used twice": partial(_fsdp1_strategy, True, TwiceFlatLit, runs=2),
    "fsdp1: compiled blocks, before": partial(_fsdp1_compiled, "blocks", "before"),
    "fsdp1: callback": _fsdp1_callback,
    "disagree: layers": partial(
        _disagree, ["rank 0 has block", "rank 1 has block"], layers="net.layers.[02]"
    ),
    "disagree: every_n": partial(_disagree, ["rank 1", "'net.layers.1'", "keep"], every_n=2),
    "disagree: offload": partial(_disagree, ["rank 1", "offload to host"], offload=True),
    "disagree: number of blocks": partial(_disagree, ["net.layers.3", "rank 1"], (3, 8)),
    "disagree: width": partial(
        _disagree, ["'net.layers.0.up.weight'", "(8, 8)", "rank 1", "(9, 8)"], (4, 9)
    ),
    "disagree: one finds none": partial(
        _disagree, ["rank 1 could not", "no_such"], own_error="no_such", layers="no_such"
    ),
    "disagree: predicate fails": partial(
        _disagree, ["rank 1 could not", "of my own"], own_error="of my own", layers=_complains
    ),
    "disagree: fsdp1": partial(_disagree_sharded, OurCPUFSDPStrategy, FlatLit),
    "disagree: fsdp2": partial(_disagree_sharded, OUR_FSDP2, ShardedLit),
    "disagree: callback": partial(
        _disagree, ["rank 1", "'net.layers.1'", "keep"], adapter="callback", every_n=2
    ),
}
FILE_CASES: dict[str, Callable[[str], None]] = {
    "fsdp2: checkpoints, one file": partial(_fsdp2_checkpoints, True),
    "fsdp2: checkpoints, sharded": partial(_fsdp2_checkpoints, False),
    "ddp: checkpoints": _ddp_checkpoints,
    "tensor parallel: checkpoints, sharded": partial(
        _fsdp2_checkpoints, False, factory=TensorParallelLit, **TP
    ),
}


def _pair_worker(rank: int, folder: str, names: list[str]) -> None:
    join_pair(rank, Path(folder, "store"), TIME_OUT)
    outcome: dict[str, str] = {}
    cases = CASES | {name: partial(case, folder) for name, case in FILE_CASES.items()}
    for name in names:
        began = time.monotonic()
        try:
            cases[name]()
        except BaseException as error:  # told to the parent, which fails the case
            outcome[name] = f"{type(error).__name__}: {error}"
        if time.monotonic() - began > TIME_OUT - 1:
            break  # the two are out of step
        outcome.setdefault(name, "")
    torch.save(outcome, f"{folder}/{rank}.pt")


# In some pairs of processes, or one would take more than a minute on a busy machine.
WORDS = ("compiled", "checkpoints", "tensor parallel", "fsdp1", "fsdp2")
GROUPS = {
    name: next((word for word in WORDS if word in name), "others") for name in CASES | FILE_CASES
}


@pytest.fixture(scope="module")
def pair_outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """What went wrong in a case, by rank; "" is nothing. The first of a group runs the group."""
    outcomes: dict[str, list[dict[str, str]]] = {}

    def of(case: str) -> list[str]:
        group = GROUPS[case]
        if group not in outcomes:
            names = [name for name in GROUPS if GROUPS[name] == group]
            folder = tmp_path_factory.mktemp("pair")
            mp.spawn(_pair_worker, (str(folder), names), nprocs=2)
            outcomes[group] = [torch.load(folder / f"{rank}.pt") for rank in range(2)]
        return [outcome.get(case, "was not reached") for outcome in outcomes[group]]

    return of


@pytest.mark.parametrize("case", [*CASES, *FILE_CASES])
def test_two_processes(case: str, pair_outcomes: Callable[[str], list[str]]) -> None:
    """Reports A1 to A16, pitfalls 17 to 23; what is compared is in the case's function."""
    assert pair_outcomes(case) == ["", ""]


@pytest.mark.parametrize("page", ["README.md", "docs/strategies.md"])
def test_cases_that_the_documents_name_are_there(page: str) -> None:
    """`ddp: bf16-...` stands for all that begin so."""
    path = Path(__file__).parents[2] / page
    if not path.exists():
        pytest.skip("a source distribution has no docs")
    text = path.read_text()
    named = re.findall(r"`((?:ddp|fsdp1|fsdp2|disagree|tensor parallel)(?:: [^`]*)?)`", text)
    assert len(named) > 10
    for name in named:
        start = name.removesuffix("...")
        assert name in GROUPS or (start != name and any(c.startswith(start) for c in GROUPS)), name


class Failing(ShardedLit):
    """The second rank raises, or is killed, in the middle of an epoch."""

    def __init__(self, kills: bool) -> None:
        super().__init__()
        self.kills = kills

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_rank == 1 and batch_idx == 2:
            if self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise Complaint("in the middle of an epoch")
        return super().training_step(batch, batch_idx)


def _failing_worker(rank: int, folder: str) -> None:
    """One rank raises under DDP; then, in a new group, one is killed under FSDP2."""
    for name, seconds in {"raises": 5, "killed": TIME_OUT}.items():
        join_pair(rank, Path(folder, name), seconds)
        kills = name == "killed"
        model = Failing(kills)
        trainer = trainer_of(strategy=OUR_FSDP2() if kills else OUR_DDP(), devices=2, max_epochs=1)
        began = time.monotonic()
        try:
            trainer.fit(model, loader(2 * STEPS))
        except (RuntimeError, Complaint) as error:
            assert_plain_classes(model)
            assert time.monotonic() - began < seconds + 5, "it waited"
            outcome = f"{type(error).__name__} in batch {trainer.fit_loop.batch_idx}"
            torch.save(outcome, f"{folder}/{name}{rank}.pt")
        if kills:
            os._exit(0)  # gloo's threads may abort the process while they wait for the dead peer
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_one_rank_fails(tmp_path: Path) -> None:
    """The other ends within the time-out with torch's error; its model is restored."""
    context = mp.get_context("spawn")
    workers = [context.Process(target=_failing_worker, args=(r, str(tmp_path))) for r in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, -signal.SIGKILL]
    found = {path.stem: torch.load(path) for path in tmp_path.glob("*.pt")}
    assert found["raises1"] == "Complaint in batch 2"
    assert found["raises0"].endswith("Error in batch 2")  # gloo's RuntimeError, or a kind of it
    assert found["killed0"].endswith("Error in batch 2")
    assert "killed1" not in found


class Spawned(Lit):
    """Checks in the spawned process that the blocks are recomputed."""

    def on_train_start(self) -> None:
        self._context = executions(self, NAMES)
        self._counts = self._context.__enter__()

    def on_train_end(self) -> None:
        self._context.__exit__(None, None, None)
        counts = [self._counts[name] for name in NAMES]
        del self._context, self._counts
        if counts != [2 * STEPS, STEPS] * 2:
            raise RuntimeError(f"not recomputed: {counts}")


@pytest.mark.filterwarnings("ignore")
def test_ddp_spawn() -> None:
    """Report A16: module and strategy are pickled into two spawned processes."""
    model = Spawned()
    before = copy.deepcopy(model.state_dict())
    strategy = PartialCheckpointDDPStrategy(every_n=2, start_method="spawn")
    trainer_of(strategy=strategy, devices=2, max_epochs=1).fit(model, loader(2 * STEPS))
    assert_plain(model)
    assert not torch.equal(model.state_dict()["net.head.weight"], before["net.head.weight"])


# --- registered names and refusals


NAMED = {
    "partial_checkpoint": (PartialCheckpointStrategy, {"devices": 1}),
    "partial_checkpoint_ddp": (PartialCheckpointDDPStrategy, {}),
    "partial_checkpoint_ddp_find_unused_parameters_true": (PartialCheckpointDDPStrategy, {}),
    "partial_checkpoint_ddp_spawn": (PartialCheckpointDDPStrategy, {}),
    "partial_checkpoint_model_parallel": (PartialCheckpointModelParallelStrategy, {}),
}


@pytest.mark.parametrize("name", NAMED)
def test_registered_names(name: str) -> None:
    """A trainer takes the word; Lightning's own way to start the processes goes with it."""
    kind, options = NAMED[name]
    trainer = trainer_of(strategy=name, **({"devices": 2} | options))
    strategy: Any = trainer.strategy
    assert type(strategy) is kind
    assert strategy.fit_plan.every_n == 1
    launcher = type(strategy.launcher).__name__
    if name.endswith("spawn"):
        assert launcher == "_MultiProcessingLauncher"
    elif name != "partial_checkpoint":
        assert launcher == "_SubprocessScriptLauncher"
    if "unused" in name:
        assert strategy._ddp_kwargs == {"find_unused_parameters": True}


def test_all_names_are_registered() -> None:
    names = {name for name in StrategyRegistry if name.startswith("partial_checkpoint")}
    assert names == {*NAMED, "partial_checkpoint_fsdp"}
    assert all(len(StrategyRegistry[name]["description"]) > 20 for name in names)


KINDS = [
    PartialCheckpointStrategy,
    PartialCheckpointDDPStrategy,
    PartialCheckpointFSDPStrategy,
    PartialCheckpointModelParallelStrategy,
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "value"),
    [("every_n", 0), ("every_n", 2.5), ("every_n", True), ("offload", "yes"), ("layers", 3)],
    ids=str,
)
def test_bad_arguments(kind: Any, name: str, value: Any) -> None:
    """Refused when the strategy is made, as by the callback, in the same words."""
    with pytest.raises((TypeError, ValueError)) as ours:
        kind(**{name: value})
    with pytest.raises(type(ours.value)) as callbacks:
        PartialCheckpoint(**{name: value})
    assert str(ours.value) == str(callbacks.value)


def refused(*callbacks: Callback, model: Any = None, **options: Any) -> str:
    """The message; the model must be left alone."""
    model = model or Lit()
    with pytest.raises((MisconfigurationException, ValueError)) as caught:
        trainer_of(*callbacks, **options).fit(model, loader())
    assert_plain(model)
    return str(caught.value)


def test_callback_and_strategy_together() -> None:
    message = refused(PartialCheckpoint(every_n=2), strategy=PartialCheckpointStrategy(every_n=4))
    assert "drop the callback" in message
    assert "PartialCheckpointStrategy" in message


def test_several_devices_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for, or found by `auto`."""
    strategies: list[Any] = ["partial_checkpoint", PartialCheckpointStrategy()]
    for strategy in strategies:
        message = refused(strategy=strategy, devices=2)
        assert "one device, the trainer has 2" in message
        assert "devices=1" in message
        assert "partial_checkpoint_ddp" in message
    monkeypatch.setattr(L.pytorch.accelerators.CPUAccelerator, "auto_device_count", lambda *a: 3)
    assert "the trainer has 3" in refused(strategy="partial_checkpoint", devices="auto")


@pytest.mark.parametrize("strategy", ["partial_checkpoint_fsdp", PartialCheckpointFSDPStrategy])
def test_fsdp_needs_cuda(strategy: Any) -> None:
    message = refused(strategy=strategy if isinstance(strategy, str) else strategy(), devices=2)
    assert "CUDA" in message
    assert "partial_checkpoint_model_parallel" in message


def test_fsdp_with_a_policy_of_its_own() -> None:
    """Report A12: both would recompute."""
    with pytest.raises(MisconfigurationException, match="activation_checkpointing_policy"):
        PartialCheckpointFSDPStrategy(activation_checkpointing_policy={NormBlock})


@pytest.mark.parametrize("factory", [Lit, LateLit], ids=lambda f: f.__name__)
def test_layers_that_match_nothing(factory: type[Lit]) -> None:
    """Report A13: an error before the first step."""
    strategy = PartialCheckpointStrategy(layers="no_such_layer")
    assert "no_such_layer" in refused(strategy=strategy, model=factory())


def test_blocks_that_torch_checkpoints() -> None:
    model = Lit()
    torch.distributed._composable.checkpoint(model.net.layers[0])
    assert "checkpointed already" in refused(strategy=PartialCheckpointStrategy(), model=model)


def test_one_rank_of_a_group_may_train_alone(gloo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of the others, who would not answer."""
    monkeypatch.setattr(dist, "get_world_size", lambda *a: 2)
    monkeypatch.setattr(dist, "all_gather_object", lambda *a: pytest.fail("asked"))
    assert train(PartialCheckpointStrategy(every_n=2), Lit()) == [[2, 1, 2, 1]] * STEPS
