"""What is misspelt or impossible is refused before anything is built, and the key is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from app_helpers import Compose
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from lightning_ckpt import schemas
from lightning_ckpt.config import check


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("checkpoint.evry_n=4", "checkpoint.evry_n"),
        ("trainer.precison=16-true", "trainer.precison"),
        ("data.batchsize=4", "data.batchsize"),
        ("model.layers=4", "model.layers"),
        ("callbacks.peak_memry=null", "callbacks.peak_memry"),
        ("sed=4", "sed"),
        ("checkpoint.every_n=2.5", "checkpoint.every_n"),
        ("checkpoint.every_n=true", "checkpoint.every_n"),
        ("checkpoint.every_n=null", "checkpoint.every_n"),
        ("trainer.max_epochs=abc", "trainer.max_epochs"),
        ("data.batch_size=abc", "data.batch_size"),
        ("model.num_layers=1.5", "model.num_layers"),
    ],
)
def test_hydra_refuses_unknown_keys_and_wrong_types(
    override: str, named: str, compose_app: Compose
) -> None:
    with pytest.raises(ConfigCompositionException, match=re.escape(named)):
        compose_app(override)


def test_every_n_of_no_checkpoint_is_refused(compose_app: Compose) -> None:
    with pytest.raises(ConfigCompositionException, match=r"checkpoint\.every_n"):
        compose_app("checkpoint=none", "checkpoint.every_n=4")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["checkpoint.every_n=0"], "checkpoint.every_n must be at least 1, got 0"),
        (["checkpoint.every_n=-1"], "checkpoint.every_n must be at least 1, got -1"),
        (["checkpoint.offload=hsot"], "checkpoint.offload='hsot' is not known"),
        (["checkpoint.offload=1"], "checkpoint.offload must be"),
        (["checkpoint.layers=3"], "checkpoint.layers"),
        (["checkpoint.on_oom=retry"], "checkpoint.on_oom='retry' is not known"),
        (["strategy=single_device", "strategy.on_oom=on"], "strategy.on_oom='on' is not known"),
        (["checkpoint.budget=1GiB"], "checkpoint.every_n=2 contradicts budget and plan"),
        (
            ["strategy=ddp", "strategy.plan=p.yaml"],
            "strategy.every_n=2 contradicts budget and plan",
        ),
        (["checkpoint=full", "checkpoint.every_n=4"], "contradicts checkpoint=full"),
        (["+checkpoint.evry_n=4"], "did you mean checkpoint.every_n?"),
        (["+trainer.precison=bf16-mixed"], "did you mean trainer.precision?"),
        (["+model.zzz=4"], "model.zzz is not known to gpt.GPT; it takes num_layers, "),
        (["+callbacks.x.every_n=2"], "callbacks.x={'every_n': 2} has no _target_"),
        (["+callbacks.model_checkpoint.monitr=x"], "callbacks.model_checkpoint.monitr"),
        (["+logger.csv.nme=x"], "did you mean logger.csv.name?"),
        (["trainer.max_epochs=-2"], "trainer.max_epochs must be at least -1, got -2"),
        (["trainer.accumulate_grad_batches=0"], "trainer.accumulate_grad_batches"),
        (["data.batch_size=-1"], "data.batch_size must be at least 1, got -1"),
        (["data.batch_size=0"], "data.batch_size must be at least 1, got 0"),
        (["data.val_fraction=1.0"], "data.val_fraction must be at least 0 and below 1"),
        (["data.val_fraction=0"], "data.val_fraction must be above 0"),
        (["data.max_bytes=0"], "data.max_bytes must be at least 1"),
        (["data.path=/no/such/text"], "data.path='/no/such/text' does not exist"),
        (["model.num_layers=0"], "model.num_layers must be at least 1, got 0"),
        (["model.num_heads=5"], "model.width=64 is no multiple of num_heads=5"),
        (["model.dropout=1.0"], "model.dropout must be at least 0 and below 1"),
        (["model.vocab_size=100"], "model.vocab_size must be at least 256, got 100"),
        (["model.learning_rate=-1"], "model.learning_rate must be at least 0"),
        (["model.sequence_length=8"], "model.sequence_length=8 is below data.sequence_length=256"),
        (["model=vit", "data=digits", "model.patch_size=3"], "model.patch_size=3 does not divide"),
        (["model=vit"], "vit.ViT takes images, text.Text gives text; use model=gpt"),
        (["data=digits"], "gpt.GPT takes text, digits.Digits gives images"),
        (["model=hf_causal_lm", "data=digits"], "hf_causal_lm.HFCausalLM takes text"),
        (
            ["model=hf_causal_lm", "model.config=/no/such/model"],
            "model.config='/no/such/model' is no local directory with a config.json",
        ),
        (["model=hf_causal_lm", "~model.config.model_type"], "has no model_type"),
    ],
)
def test_check_refuses(overrides: list[str], message: str, compose_app: Compose) -> None:
    config = compose_app(*overrides)
    with pytest.raises(ValueError, match=re.escape(message)):
        check(config)


def test_nothing_is_built_before_the_check(
    compose_app: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    import train

    built: list[object] = []
    monkeypatch.setattr(train, "instantiate", built.append)
    with pytest.raises(ValueError, match=r"model\.num_layers"):
        train.main(compose_app("model.num_layers=0"))
    assert built == []


def test_missing_transformers_names_the_extra(
    compose_app: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose_app("model=hf_causal_lm")
    monkeypatch.setattr(schemas, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=re.escape("pip install 'lightning-ckpt[hf]'")):
        check(config)


def test_an_apps_own_groups_are_passed_over() -> None:
    check(OmegaConf.create({"mine": {"depth": -1}}))
    check(OmegaConf.create({"model": {"_target_": "torch.nn.Linear", "in_features": 2}}))


def test_text_too_short_for_a_batch(tmp_path: Path) -> None:
    from text import Text

    (tmp_path / "short.txt").write_text("too short")
    data = Text(
        path=str(tmp_path),
        max_bytes=None,
        sequence_length=16,
        batch_size=2,
        val_fraction=0.1,
        num_workers=0,
        seed=1,
    )
    with pytest.raises(ValueError, match=r"data\.path=.* holds 9 bytes, too few"):
        data.setup("fit")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gtp2"}, "model.config.model_type='gtp2' is not known"),
        ({"model_type": "gpt2", "hiden_size": 8}, "model.config.hiden_size is not known to GPT2"),
        ({"model_type": "gpt2", "vocab_size": 8}, "model.config.vocab_size=8 is below 256"),
        ({"model_type": "gpt2", "n_positions": 8}, "max_position_embeddings=8 is below"),
    ],
)
def test_hf_config_is_refused(config: dict[str, object], message: str) -> None:
    pytest.importorskip("transformers")
    from hf_causal_lm import HFCausalLM

    with pytest.raises(ValueError, match=re.escape(message)):
        HFCausalLM(config, sequence_length=16, learning_rate=0.1, weight_decay=0.0)
