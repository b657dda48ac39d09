"""Tiny random models of Hugging Face families, by their real classes, and batches for them.

Activations must outweigh parameters, or peak memory would say nothing: narrow layers, long batches.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

# What the families call their sizes. A row's own words come on top.
SIZES: dict[str, int] = {
    # depth
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 3),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers"), 3),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers"), 2),
    # width
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "hidden_dim"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "mlp_dim"), 48),
    # attention
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **{"num_key_value_heads": 2, "head_dim": 8, "d_kv": 8, "q_lora_rank": 8, "kv_lora_rank": 8},
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim"), 8),
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **{"num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    # vocabularies and positions
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input"), 99),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    # pictures
    **{"image_size": 32, "patch_size": 8},
    # special tokens, which must fit the vocabulary
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0},
}

ROWS, LENGTH = 4, 24

Batch = dict[str, Any]


DEFAULT: Any = object()  # among a row's words: leave the size alone


class Part(NamedTuple):
    """Among a row's words: a config of a part, by the name of its class."""

    config: str
    words: dict[str, Any]


def make_config(cls: Any, words: Mapping[str, Any]) -> Any:
    """A config of this class, with small sizes where it has such, and then `words`."""
    default = cls()
    sizes = {k: v for k, v in SIZES.items() if _is_size(getattr(default, k, None))}
    if getattr(default, "num_key_value_heads", 0) is None:
        sizes["num_key_value_heads"] = SIZES["num_key_value_heads"]
    given = {k: v for k, v in (sizes | dict(words)).items() if v is not DEFAULT}
    return cls(**{key: _made(value) for key, value in given.items()})


def _made(value: Any) -> Any:
    if not isinstance(value, Part):
        return value
    return getattr(importlib.import_module("transformers"), value.config)(**value.words)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# --- batches, the same at each call


def _stream() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def ids(rows: int = ROWS, length: int = LENGTH) -> Tensor:
    """Token ids (rows, length), none of them special."""
    return torch.randint(3, 90, (rows, length), generator=_stream())


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_stream())


def text() -> Batch:
    return {"input_ids": ids()}


def labelled_text() -> Batch:
    return {"input_ids": ids(), "labels": ids()}


def pictures(size: int = 32, rows: int = ROWS) -> Callable[[], Batch]:
    """Three channels, square."""
    return lambda: {"pixel_values": noise(rows, 3, size, size)}


def labelled_pictures(size: int = 32, rows: int = ROWS) -> Callable[[], Batch]:
    """Of two classes."""
    return lambda: pictures(size, rows)() | {"labels": torch.arange(rows) % 2}


def video() -> Batch:
    return {"pixel_values": noise(ROWS, 4, 3, 16, 16)}


def sound() -> Batch:
    return {"input_values": noise(ROWS, 2000)}


def text_and_pictures() -> Batch:
    return text() | pictures()()


def pairs() -> Batch:
    """Texts with their pictures, for a contrastive loss."""
    return text_and_pictures() | {"return_loss": True}
