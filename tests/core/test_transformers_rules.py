"""What we do with Hugging Face models: which blocks, whose switch, and what becomes of caches.

All models are made from configurations of a few thousand parameters.
"""

import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from lightning_ckpt import apply_partial_checkpoint
from lightning_ckpt.core._transformers import (
    already_checkpointing,
    is_of_library,
    take_over_switches,
    without_caches,
)
from lightning_ckpt.core.blocks import find_blocks

hf = pytest.importorskip("transformers")

from transformers.cache_utils import DynamicCache, EncoderDecoderCache  # noqa: E402
from transformers.modeling_layers import GradientCheckpointingLayer  # noqa: E402

CAN_COUNT = hasattr(hf.PreTrainedModel, "activation_checkpointing_enable")  # from 5.24

TEXT = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
GPT = {"vocab_size": 37, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 32}
STACKS = {
    "vocab_size": 37,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
T5 = {
    "vocab_size": 37,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
IMAGE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
SOUND = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "conv_dim": [8, 8],
    "conv_kernel": [3, 3],
    "conv_stride": [2, 2],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}


def encoder_decoder(encoder=2, decoder=3, stem="layers", prefix=""):
    return [f"{prefix}encoder.{stem}.{i}" for i in range(encoder)] + [
        f"{prefix}decoder.{stem}.{i}" for i in range(decoder)
    ]


def three(stem):
    return [f"{stem}.{i}" for i in range(3)]


# model class -> configuration class, its arguments, names of the blocks
FLAT = {
    "GPT2LMHeadModel": (hf.GPT2Config, GPT, three("transformer.h")),
    "GPTNeoXForCausalLM": (hf.GPTNeoXConfig, TEXT, three("gpt_neox.layers")),
    "LlamaForCausalLM": (hf.LlamaConfig, TEXT, three("model.layers")),
    "MistralForCausalLM": (
        hf.MistralConfig,
        {**TEXT, "num_key_value_heads": 2},
        three("model.layers"),
    ),
    "Qwen2ForCausalLM": (hf.Qwen2Config, {**TEXT, "num_key_value_heads": 2}, three("model.layers")),
    "GemmaForCausalLM": (
        hf.GemmaConfig,
        {**TEXT, "head_dim": 8, "num_key_value_heads": 2},
        three("model.layers"),
    ),
    "PhiForCausalLM": (hf.PhiConfig, TEXT, three("model.layers")),
    "MixtralForCausalLM": (
        hf.MixtralConfig,
        {**TEXT, "num_local_experts": 3, "num_key_value_heads": 2},
        three("model.layers"),
    ),
    "OPTForCausalLM": (
        hf.OPTConfig,
        {**TEXT, "ffn_dim": 24, "word_embed_proj_dim": 16},
        three("model.decoder.layers"),
    ),
    "BloomForCausalLM": (
        hf.BloomConfig,
        {"vocab_size": 37, "hidden_size": 16, "n_layer": 3, "n_head": 2},
        three("transformer.h"),
    ),
    "MambaForCausalLM": (
        hf.MambaConfig,
        {"vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 3, "state_size": 4},
        three("backbone.layers"),
    ),
    "BertModel": (hf.BertConfig, TEXT, three("encoder.layer")),
    "RobertaModel": (hf.RobertaConfig, TEXT, three("encoder.layer")),
    "ElectraModel": (hf.ElectraConfig, TEXT, three("encoder.layer")),
    "DistilBertModel": (
        hf.DistilBertConfig,
        {"vocab_size": 37, "dim": 16, "hidden_dim": 24, "n_layers": 3, "n_heads": 2},
        three("transformer.layer"),
    ),
    "T5ForConditionalGeneration": (hf.T5Config, T5, encoder_decoder(stem="block")),
    "BartForConditionalGeneration": (hf.BartConfig, STACKS, encoder_decoder(prefix="model.")),
    "PegasusModel": (hf.PegasusConfig, STACKS, encoder_decoder()),
    "WhisperForConditionalGeneration": (
        hf.WhisperConfig,
        {**STACKS, "num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 8},
        encoder_decoder(prefix="model."),
    ),
    "CLIPModel": (
        hf.CLIPConfig,
        {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 8},
        three("text_model.encoder.layers") + three("vision_model.encoder.layers"),
    ),
    "Wav2Vec2Model": (
        hf.Wav2Vec2Config,
        SOUND,
        [f"feature_extractor.conv_layers.{i}" for i in (0, 1)] + three("encoder.layers"),
    ),
    "ViTModel": (hf.ViTConfig, IMAGE, three("layers" if CAN_COUNT else "encoder.layer")),
}

# The same for models whose layers are no `GradientCheckpointingLayer`s, or nest.
STAGES = {"hidden_sizes": [8, 8], "depths": [1, 2], "embedding_size": 8}
IN_STAGES = [f"encoder.stages.{name}" for name in ("0.layers.0", "1.layers.0", "1.layers.1")]
# In 4.57 only the stages are checkpointing layers.
SWIN = (
    [f"encoder.layers.{name}" for name in ("0.blocks.0", "1.blocks.0", "1.blocks.1")]
    if CAN_COUNT
    else ["encoder.layers.0", "encoder.layers.1"]
)
OTHERS = {
    "SwinModel": (
        hf.SwinConfig,
        {"image_size": 8, "patch_size": 2, "embed_dim": 8, "depths": [1, 2], "num_heads": [1, 2]},
        SWIN,
    ),
    "ResNetModel": (
        hf.ResNetConfig,
        STAGES,
        IN_STAGES,
    ),
    "ConvNextModel": (
        hf.ConvNextConfig,
        {"hidden_sizes": [8, 8], "depths": [1, 2], "num_stages": 2},
        IN_STAGES,
    ),
    "AlbertModel": (
        hf.AlbertConfig,
        {**TEXT, "embedding_size": 8},
        ["encoder.albert_layer_groups.0.albert_layers.0"],
    ),
    "XLNetModel": (
        hf.XLNetConfig,
        {"vocab_size": 37, "d_model": 16, "n_layer": 3, "n_head": 2, "d_inner": 24},
        three("layer"),
    ),
}


ALL = {**FLAT, **OTHERS}


def make(name):
    config_class, arguments, _ = ALL[name]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(hf, name)(config_class(**arguments)).train()


def turn_on(model, **kwargs):
    """The library's switch, under its present name."""
    if CAN_COUNT:
        model.activation_checkpointing_enable(**kwargs)
    else:
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}, **kwargs
        )


def switches(model):
    return {
        name: {key: vars(module).get(key, "absent") for key in SWITCH}
        for name, module in model.named_modules()
    }


SWITCH = ("gradient_checkpointing", "_gradient_checkpointing_func")


def blocks_of(model):
    return [block.module for block in find_blocks(model)]


# --- which blocks --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_finds_the_layers(name):
    assert [block.name for block in find_blocks(make(name))] == ALL[name][2]


def test_finds_them_below_other_modules():
    tower = nn.ModuleDict(
        {"text": make("BertModel"), "image": nn.ModuleList(EncoderLayer() for _ in range(2))}
    )
    assert [block.name for block in find_blocks(nn.ModuleDict({"lit": tower}))] == [
        *three("lit.text.encoder.layer"),
        "lit.image.0",
        "lit.image.1",
    ]


class EncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)))


def test_heads_beside_a_model_are_no_blocks():
    tasks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 2)) for _ in range(2))
    module = nn.ModuleDict({"backbone": make("BertModel"), "task_heads": tasks})
    assert [block.name for block in find_blocks(module)] == three("backbone.encoder.layer")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_adapters_change_nothing():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2)
    model = peft.get_peft_model(make("LlamaForCausalLM"), config)
    assert [block.name for block in find_blocks(model)] == three("base_model.model.model.layers")


@pytest.mark.skipif(not CAN_COUNT, reason="every_n_layers came with Transformers 5.24")
@pytest.mark.parametrize("every_n", [1, 2, 3])
@pytest.mark.parametrize("name", FLAT)
def test_every_n_means_what_it_means_in_transformers(name, every_n):
    theirs = make(name)
    theirs.activation_checkpointing_enable(every_n_layers=every_n)
    checkpointed = [
        name
        for name, module in theirs.named_modules()
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing
    ]
    blocks = find_blocks(make(name))
    assert [block.name for i, block in enumerate(blocks) if i % every_n == 0] == checkpointed


# --- the library's own switch --------------------------------------------------------------------


def test_the_switch_is_taken_over_and_given_back():
    model = make("LlamaForCausalLM")
    turn_on(model)
    before = switches(model)
    undo, notes = take_over_switches(model, blocks_of(model))
    assert notes == (
        "gradient_checkpointing was on for 3 blocks: taken over, given back at removal",
    )
    assert not any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    undo()
    assert switches(model) == before


def test_a_switch_that_was_off_leaves_no_trace():
    model = make("T5ForConditionalGeneration")
    before = switches(model)
    undo, notes = take_over_switches(model, blocks_of(model))
    assert notes == ()
    undo()
    assert switches(model) == before


def test_what_the_user_turns_meanwhile_stays():
    model = make("LlamaForCausalLM")
    turn_on(model)
    undo, _ = take_over_switches(model, blocks_of(model))
    turn_on(model)
    after = switches(model)
    undo()
    assert switches(model) == after


@pytest.mark.skipif(not CAN_COUNT, reason="before 5.24 the stages are the only layers")
def test_a_stage_does_not_recompute_its_layers():
    model = make("SwinModel")
    turn_on(model)
    before = switches(model)
    undo, notes = take_over_switches(model, blocks_of(model))
    assert not any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    assert notes[0].startswith("gradient_checkpointing was on for 3 blocks")
    undo()
    assert switches(model) == before


def test_layers_that_are_not_chosen_keep_their_switch():
    model = make("BartForConditionalGeneration")
    turn_on(model)
    blocks = [block.module for block in find_blocks(model, "model.encoder.layers.*")]
    undo, notes = take_over_switches(model, blocks)
    on = [name for name, m in model.named_modules() if getattr(m, "gradient_checkpointing", False)]
    assert [name for name in on if name.endswith(("0", "1", "2"))] == three("model.decoder.layers")
    assert notes[1] == "gradient_checkpointing stays on for 3 modules that are no blocks here"
    undo()


class Adapter(nn.Module):
    """Checkpoints a part of itself, as modules of Transformers do that are no layers."""

    def __init__(self):
        super().__init__()
        self.gradient_checkpointing = False
        self.proj = nn.Linear(16, 16)
        self.runs = 0

    def part(self, x):
        self.runs += 1
        return self.proj(x).tanh()

    def forward(self, x):
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(self.part, x)
        return self.part(x)


def test_other_modules_are_turned_on_and_not_counted():
    model = make("BertModel")
    model.adapter = Adapter()
    before = switches(model)
    undo, notes = take_over_switches(model, blocks_of(model))
    assert notes == ()
    assert len(find_blocks(model)) == 3
    model.adapter(torch.zeros(2, 16, requires_grad=True)).sum().backward()
    assert model.adapter.runs == 2
    func = model.adapter._gradient_checkpointing_func
    assert func.keywords == {"use_reentrant": False}
    pickle.loads(pickle.dumps(func))
    undo()
    assert switches(model) == before


def test_other_peoples_attribute_of_that_name_is_left_alone():
    module = nn.ModuleDict({"mine": Adapter(), "bert": make("BertModel")})
    undo, _ = take_over_switches(module, blocks_of(module))
    assert module["mine"].gradient_checkpointing is False
    undo()


def test_hook_on_the_embeddings_stays():
    model = make("LlamaForCausalLM")
    turn_on(model)
    hooks = dict(model.get_input_embeddings()._forward_hooks)
    undo, _ = take_over_switches(model, blocks_of(model))
    assert dict(model.get_input_embeddings()._forward_hooks) == hooks
    undo()


def test_who_checkpoints_when_the_switch_comes_after_us():
    model = make("LlamaForCausalLM")
    block = model.model.layers[0]
    assert not already_checkpointing(block)
    turn_on(model)
    # Up to 4.57 the layer checkpoints around our forward; later it leaves it to the outermost one.
    assert already_checkpointing(block) is ("__call__" in vars(GradientCheckpointingLayer))
    assert not already_checkpointing(model.model.layers[0].eval())
    assert not already_checkpointing(nn.Linear(1, 1))


# --- caches --------------------------------------------------------------------------------------


def filled(layers=1):
    cache = DynamicCache()
    for layer in range(layers):
        cache.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), layer)
    return cache


@pytest.mark.parametrize(
    "name",
    ["cache", "cache_params", "layer_past", "past_key_value", "past_key_values"],
)
@pytest.mark.parametrize("cache", [DynamicCache(), (torch.zeros(1), torch.zeros(1))])
def test_caches_by_keyword(name, cache):
    block = make("LlamaForCausalLM").model.layers[0]
    given = {name: cache, "use_cache": True, "mask": 1}
    args, kwargs = without_caches(block, (), given)
    assert (args, kwargs) == ((), {name: None, "use_cache": False, "mask": 1})
    assert given[name] is cache


@pytest.mark.parametrize(
    "cache", [DynamicCache(), EncoderDecoderCache(DynamicCache(), DynamicCache())]
)
def test_caches_by_position(cache):
    block = make("GPT2LMHeadModel").transformer.h[0]
    hidden = torch.zeros(1)
    args, kwargs = without_caches(block, (hidden, cache, None), {})
    assert args[0] is hidden
    assert args[1:] == (None, None)
    assert kwargs == {}


def test_without_a_cache_nothing_is_made_anew():
    block = make("LlamaForCausalLM").model.layers[0]
    kwargs = {"cache": None, "use_cache": False}
    assert without_caches(block, (), kwargs)[1] is kwargs


def test_other_peoples_blocks_keep_their_arguments():
    """They may call something else a cache: nothing is taken from what they are given."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, cache, use_cache):
            assert use_cache
            assert cache is given
            return torch.tanh(self.linear(x))

    given = DynamicCache()
    model = nn.ModuleList(Block() for _ in range(2))
    with apply_partial_checkpoint(model, layers=Block):
        model[0](torch.ones(1, 4), cache=given, use_cache=True).sum().backward()
    assert not is_of_library(Block)
    assert is_of_library(type(make("LlamaForCausalLM").model.layers[0]))


def test_layers_that_may_keep_their_cache_do():
    block = make("LlamaForCausalLM").model.layers[0]
    block._can_checkpoint_with_cache = True
    cache = filled()
    _, kwargs = without_caches(block, (), {"cache": cache, "use_cache": True})
    assert kwargs == {"cache": cache, "use_cache": False}


def test_older_layers_keep_use_cache():
    """They return something more with it, and their model looks for that."""
    block = make("XLNetModel").layer[0]
    assert without_caches(block, (), {"use_cache": True})[1] == {"use_cache": True}


def test_a_cache_with_something_in_it_is_refused():
    layers = make("LlamaForCausalLM").model.layers
    cache = filled(layers=1)
    without_caches(layers[1], (), {"cache": cache})  # not yet its own part
    with pytest.raises(
        ValueError, match="past_key_values: the cache given to a LlamaDecoderLayer is"
    ):
        without_caches(layers[0], (), {"cache": cache})


def test_a_looped_layer_has_a_place_for_each_pass():
    block = make("LlamaForCausalLM").model.layers[0]
    kwargs = {"cache": filled(layers=1), "cycle_offset": 3}
    _, kwargs = without_caches(block, (), kwargs)
    assert kwargs == {"cache": None, "cycle_offset": 3}


# --- without Transformers ------------------------------------------------------------------------


WITHOUT = """
import sys
from torch import nn
from lightning_ckpt.core import _transformers
from lightning_ckpt.core.blocks import find_blocks

# Other libraries may have imported it: as if nobody had.
for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
    del sys.modules[name]
sys.modules["transformers"] = None  # an import of it raises from here on

model = nn.Transformer(4, 2, 1, 1, 4, batch_first=True)
block = find_blocks(model)[0].module
undo, notes = _transformers.take_over_switches(model, [block])
undo()
assert notes == ()
assert not _transformers.already_checkpointing(block)
assert not _transformers.is_of_library(type(block))
"""


def test_works_without_transformers():
    subprocess.run([sys.executable, "-W", "ignore", "-c", WITHOUT], check=True)
