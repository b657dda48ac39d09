"""Every file of `conf/` composes and makes its object, and callbacks can be changed from outside.

Rows L1 to L4 of the field reports: hydra template #629, #127, Hydra #1939, segmentation template
#46.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import lightning as L
import pytest
import torch
from app_helpers import ROOT, TINY, TINY_NET, Compose
from hydra.errors import ConfigCompositionException
from hydra.utils import instantiate
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf

from lightning_ckpt import (
    OffloadConfig,
    PartialCheckpoint,
    PartialCheckpointDDPStrategy,
    PeakMemoryMonitor,
)
from lightning_ckpt.config import check
from lightning_ckpt.core.offload import read_offload

CHOICES = sorted(
    (path.parent.name, path.stem)
    for path in (ROOT / "conf").glob("*/*.yaml")
    if (path.parent.name, path.stem) != ("logger", "wandb")  # an optional package
    and path.parent.name != "offload"  # a part of the others
)
PARTNER = {
    "budget": "checkpoint.budget=1GiB",  # a CPU needs bytes
    "vit": "data=digits",
    "digits": "model=vit",
    "plan": "checkpoint.plan={blocks:[{name:blocks.0,action:recompute}]}",
}


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_each_file_composes_and_makes_its_objects(
    group: str, choice: str, compose_app: Compose
) -> None:
    partner = [PARTNER[choice]] if choice in PARTNER else []
    place = "monitor@callbacks.peak_memory" if group == "monitor" else group
    config = compose_app(f"{place}={choice}", *partner)
    check(config)
    node = config.callbacks.peak_memory if group == "monitor" else config[group]
    nodes = node.values() if group in ("callbacks", "logger") else [node] if node else []
    assert all(instantiate(each) is not None for each in nodes)


def test_out_of_memory_words_arrive(compose_app: Compose) -> None:
    callback = instantiate(compose_app("checkpoint.on_oom=tighten").checkpoint)
    assert callback.fit_plan.on_oom == "tighten"
    config = compose_app("strategy=single_device", "strategy.on_oom=tighten")
    assert instantiate(config.strategy).fit_plan.on_oom == "tighten"


def test_wandb_composes_and_is_not_needed(compose_app: Compose) -> None:
    config = compose_app("logger=wandb")
    check(config)
    assert config.logger.wandb._target_ == "lightning.pytorch.loggers.WandbLogger"


def test_default_is_partial(compose_app: Compose) -> None:
    callback = instantiate(compose_app().checkpoint)
    assert isinstance(callback, PartialCheckpoint)
    assert callback.every_n == 2


@pytest.mark.parametrize("group", ["checkpoint", "strategy"])
@pytest.mark.parametrize(
    "choice", sorted(path.stem for path in (ROOT / "conf" / "offload").glob("*.yaml"))
)
def test_offload_groups(group: str, choice: str, compose_app: Compose) -> None:
    other = ["checkpoint=none", "strategy=single_device"] if group == "strategy" else []
    config = compose_app(
        *other, f"+offload@{group}.offload={choice}", f"{group}.offload.prefetch=3"
    )
    check(config)
    offload = read_offload(instantiate(config[group]).fit_plan.offload)
    assert offload is not None
    assert offload.target == ("disk" if choice == "disk" else "host")
    assert offload.scope == (choice if choice in ("kept", "all") else "inputs")
    assert dataclasses.replace(offload, prefetch=1) == OffloadConfig(offload.target, offload.scope)


def test_values_of_an_offload_group_are_checked(compose_app: Compose) -> None:
    for word, text in (
        ("keep_last=-1", "keep_last must be"),
        ("target=dsik", "target='dsik' is not"),
    ):
        config = compose_app("+offload@checkpoint.offload=disk", f"checkpoint.offload.{word}")
        with pytest.raises(ValueError, match=f"^checkpoint.offload {text}"):
            check(config)
    with pytest.raises(ConfigCompositionException, match=r"checkpoint\.offload\.prefech"):
        compose_app("+offload@checkpoint.offload=disk", "checkpoint.offload.prefech=1")


def test_full_is_every_block_and_none_is_no_callback(compose_app: Compose) -> None:
    import train

    assert instantiate(compose_app("checkpoint=full").checkpoint).every_n == 1
    config = compose_app("checkpoint=none", "callbacks=none")
    assert train.build_all({"checkpoint": config.checkpoint}) == []


def test_verify_is_one_key_more(compose_app: Compose) -> None:
    assert instantiate(compose_app("checkpoint.verify=true").checkpoint).verify is True


@pytest.mark.parametrize("override", ["callbacks=none", "~callbacks", "callbacks=[]"])
def test_l1_all_callbacks_can_be_removed(override: str, compose_app: Compose) -> None:
    import train

    config = compose_app(override)
    check(config)
    assert train.build_all(config.get("callbacks")) == []


def test_l1_null_group_in_another_apps_config_is_passed_over() -> None:
    import train

    config = OmegaConf.create({"callbacks": None, "checkpoint": None})
    check(config)
    assert train.build_all(config.callbacks) == []


def test_l1_null_entry_is_passed_over(compose_app: Compose) -> None:
    import train

    config = compose_app("callbacks.peak_memory=null")
    check(config)
    kinds = {type(callback) for callback in train.build_all(config.callbacks)}
    assert PeakMemoryMonitor not in kinds
    assert len(kinds) == len(config.callbacks) - 1


def test_l2_one_callback_can_be_added_and_changed(compose_app: Compose) -> None:
    import train

    config = compose_app(
        "+callbacks.stop._target_=lightning.pytorch.callbacks.EarlyStopping",
        "+callbacks.stop.monitor=val/loss",
        "callbacks.model_checkpoint.filename=newest",
    )
    check(config)
    made = train.build_all(config.callbacks)
    assert [c.monitor for c in made if isinstance(c, L.pytorch.callbacks.EarlyStopping)] == [
        "val/loss"
    ]
    assert [c.filename for c in made if isinstance(c, L.pytorch.callbacks.ModelCheckpoint)] == [
        "newest"
    ]


def test_l2_partial_checkpoint_among_the_callbacks(compose_app: Compose) -> None:
    config = compose_app(
        "checkpoint=none",
        "+callbacks.partial_checkpoint.every_n=2",
        "+callbacks.partial_checkpoint._target_=lightning_ckpt.PartialCheckpoint",
    )
    check(config)
    assert instantiate(config.callbacks.partial_checkpoint).every_n == 2


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("Block", "Block"),
        ("blocks.*", "blocks.*"),
        ("[Block,blocks.1]", ["Block", "blocks.1"]),
        ("null", None),
    ],
)
def test_l3_layers_from_the_command_line(word: str, expected: object, compose_app: Compose) -> None:
    config = compose_app(f"checkpoint.layers={word}")
    check(config)
    callback = instantiate(config.checkpoint)
    assert callback.layers == expected
    assert type(callback.layers) is type(expected)  # a list, not OmegaConf's own kind


def test_l4_one_callback_can_be_dropped(compose_app: Compose) -> None:
    before = set(compose_app().callbacks)
    after = set(compose_app("~callbacks.peak_memory").callbacks)
    assert before - after == {"peak_memory"}


def test_several_loggers(compose_app: Compose) -> None:
    assert set(compose_app("logger=[csv,tensorboard]").logger) == {"csv", "tensorboard"}


def test_seed_gives_the_same_weights_and_order(compose_app: Compose) -> None:
    config = compose_app(*TINY_NET)
    first, second = (_seeded_weight_and_batch(config) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def _seeded_weight_and_batch(config: object) -> tuple[torch.Tensor, torch.Tensor]:
    L.seed_everything(config.seed, verbose=False)
    data = instantiate(config.data)
    data.setup("fit")
    return instantiate(config.model).head.weight, next(iter(data.train_dataloader()))


def test_default_folder_is_where_hydra_says(compose_app: Compose, run_dir: Path) -> None:
    assert compose_app().trainer.default_root_dir == str(run_dir)


def test_a_strategy_takes_the_place_of_the_callback(compose_app: Compose) -> None:
    import train

    config = compose_app("strategy=ddp", "strategy.every_n=4", "+strategy.static_graph=true")
    check(config)
    strategy = instantiate(config.strategy)
    assert isinstance(strategy, PartialCheckpointDDPStrategy)
    assert strategy.fit_plan.every_n == 4
    assert train.build_all({"checkpoint": config.checkpoint}) == []


def test_both_are_refused(compose_app: Compose) -> None:
    import train

    config = compose_app(*TINY, "strategy=single_device", "checkpoint=partial")
    with pytest.raises(MisconfigurationException, match="drop the callback"):
        train.main(config)


@pytest.mark.parametrize("word", ["strategy.every_n=0", "strategy.offload=dsik"])
def test_values_of_a_strategy_are_checked(word: str, compose_app: Compose) -> None:
    key = word.partition("=")[0]
    with pytest.raises(ValueError, match=key):
        check(compose_app("strategy=ddp", word))


def test_trains_with_a_strategy(compose_app: Compose, capsys: pytest.CaptureFixture[str]) -> None:
    import train

    assert train.main(compose_app(*TINY, "strategy=single_device")) is not None
    assert "2 of 3" in capsys.readouterr().out


def test_monitor_is_chosen_and_changed_from_the_command_line(compose_app: Compose) -> None:
    config = compose_app(
        "monitor@callbacks.peak_memory=full", "callbacks.peak_memory.every_n_epochs=3"
    )
    check(config)
    monitor = instantiate(config.callbacks.peak_memory)
    assert monitor.settings.plot
    assert monitor.settings.snapshot == "oom"
    assert monitor.settings.every_n_epochs == 3
    assert not monitor.settings.table  # the app has one


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("every_n_epochs=0", "callbacks.peak_memory.every_n_epochs must be at least 1, got 0"),
        ("snapshot=never", "callbacks.peak_memory.snapshot='never' is not known"),
        ("first_steps=0", "callbacks.peak_memory.first_steps must be at least 1"),
    ],
)
def test_impossible_monitor_is_refused(override: str, message: str, compose_app: Compose) -> None:
    with pytest.raises(ValueError, match=message):
        check(compose_app(f"callbacks.peak_memory.{override}"))
