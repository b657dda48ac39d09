"""Hugging Face models train as plain ones do, bit by bit; their switch and caches do no harm."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_same, compare, executions, seed_all
from torch import Tensor, nn

from lightning_ckpt import apply_partial_checkpoint

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings(
    "ignore:.* is deprecated and will be removed in v6:FutureWarning"  # the switch's old name
)

IDS = torch.arange(24).reshape(3, 8) % 17


def gpt2() -> nn.Module:
    """Passes its cache by position; dropout is on."""
    config = transformers.GPT2Config(
        n_embd=16,
        n_layer=3,
        n_head=2,
        vocab_size=32,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config).train()


def llama() -> nn.Module:
    """Passes its cache by keyword."""
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=32,
        attention_dropout=0.1,
    )
    return transformers.LlamaForCausalLM(config).train()


def t5() -> nn.Module:
    """Two stacks, one count."""
    config = transformers.T5Config(
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=2,
        vocab_size=32,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config).train()


def mixtral() -> nn.Module:
    """A mixture of experts with router logits in the loss."""
    config = transformers.MixtralConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=32,
        output_router_logits=True,
        router_jitter_noise=0.1,
    )
    return transformers.MixtralForCausalLM(config).train()


def wav2vec2_like_layerdrop() -> nn.Module:
    """BART draws layer drop in its loop."""
    config = transformers.BartConfig(
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        vocab_size=32,
        max_position_embeddings=32,
        encoder_layerdrop=0.5,
        decoder_layerdrop=0.5,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=2,
    )
    return transformers.BartForConditionalGeneration(config).train()


MODELS = [gpt2, llama, t5, mixtral, wav2vec2_like_layerdrop]


def language_step(model: Any, index: int) -> tuple[Tensor, Tensor]:
    """The default configuration, labels given: caches are on as far as the config knows."""
    output = model(input_ids=(IDS + index) % 17, labels=IDS)
    output.loss.backward()
    return output.loss.detach(), output.logits.detach()


@pytest.mark.parametrize("factory", MODELS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("every_n", [1, 2])
def test_training_is_as_in_plain(factory: Callable[[], nn.Module], every_n: int) -> None:
    """Report G1, G2, D3, E5, pitfall 9: no warning, no double cache, no other gradient."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*removed in v6", FutureWarning)
        compare(factory, language_step, every_n=every_n, steps=2, ratio=None)


def test_outputs_keep_their_shape() -> None:
    """Report G2: hidden states and cache of a pass without gradients."""
    model = gpt2().eval()

    def outputs() -> Any:
        with torch.no_grad():
            return model(input_ids=IDS, output_hidden_states=True)

    plain = outputs()
    with apply_partial_checkpoint(model):
        ours = outputs()
    assert torch.equal(ours.logits, plain.logits)
    assert len(ours.hidden_states) == len(plain.hidden_states)
    assert type(ours.past_key_values) is type(plain.past_key_values)


def test_generation_under_no_grad_uses_the_cache() -> None:
    """Report G1: caches are off only while gradients are on."""
    model = llama().eval()
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(IDS, **options)
    with apply_partial_checkpoint(model):
        assert torch.equal(model.generate(IDS, **options), plain)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_models_own_switch(when: str, reentrant: bool) -> None:
    """Report A12, G4, pitfalls 10, 14: two executions per layer at most, then given back."""
    names = [f"transformer.h.{i}" for i in range(3)]
    seed_all(0)
    model = gpt2()
    plain = copy.deepcopy(model)
    kwargs = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    if when == "before":
        model.gradient_checkpointing_enable(**kwargs)
    before = [layer.gradient_checkpointing for layer in model.transformer.h]
    handle = apply_partial_checkpoint(model, every_n=2)
    if when == "after":
        model.gradient_checkpointing_enable(**kwargs)
    with executions(model, names) as counts, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Transformers' own word on caches
        seed_all(1)
        language_step(model, 0)
    seed_all(1)
    language_step(plain, 0)
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    assert all(counts[name] <= 2 for name in names)
    if when == "before":
        assert [counts[name] for name in names] == [2, 1, 2], "the switch is taken over"
        assert handle.plan.notes, "and the summary says so"
    handle.remove()
    if when == "before":
        assert [layer.gradient_checkpointing for layer in model.transformer.h] == before


def test_eval_mode_of_from_pretrained() -> None:
    """Report I5, pitfall 13: in eval mode the model's own switch does nothing; ours does."""
    model = gpt2().eval()
    names = [f"transformer.h.{i}" for i in range(3)]
    with apply_partial_checkpoint(model), executions(model, names) as counts:
        language_step(model, 0)
    assert [counts[name] for name in names] == [2, 2, 2]


def test_adapters() -> None:
    """Report B1, A10, pitfall 12: PEFT's LoRA over a frozen base; every adapter has a gradient."""
    peft = pytest.importorskip("peft")

    def factory() -> nn.Module:
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
        return peft.get_peft_model(llama(), config)

    ours, _ = compare(factory, language_step, steps=2)
    for name, grad in ours.grads[0].items():
        assert (grad is not None) == ("lora_" in name), name


def test_save_pretrained_is_that_of_the_plain_model(tmp_path: Any) -> None:
    """Report H1, H4: the file and the class name in the config."""
    model = gpt2()
    with apply_partial_checkpoint(model):
        model.save_pretrained(tmp_path)
    loaded, report = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))
