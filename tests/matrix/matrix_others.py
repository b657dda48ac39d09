"""Models of other libraries: diffusers, timm and torchvision, each only where it loads."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from matrix_rows import CannotRun, Row
from matrix_sizes import Batch, noise
from torch import nn

DIFFUSERS, TIMM, TORCHVISION = "diffusers", "timm", "torchvision"


def library(name: str) -> Any:
    """The module, or why it cannot be used. (timm imports torchvision, see `conftest.py`.)"""
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:
        raise CannotRun(f"{name} does not load: {type(error).__name__}: {error}") from error


def diffusers_row(
    name: str,
    blocks: str,
    words: dict[str, Any],
    batch: Callable[[], Batch],
    ratio: int | None = 2,
    note: str = "",
) -> Row:
    def make() -> nn.Module:
        return getattr(library("diffusers"), name)(**words).train()

    return Row(name, blocks, make, batch, DIFFUSERS, ratio, note=note)


def picture_row(kind: str, name: str, blocks: str, saves: bool = True, **words: Any) -> Row:
    """A model of timm or torchvision, with ten classes."""

    def make() -> nn.Module:
        if kind == TIMM:
            return library("timm").create_model(name, num_classes=10, **words).train()
        models = library("torchvision.models")
        return getattr(models, name)(weights=None, num_classes=10, **words).train()

    note = "" if saves else "at this size the gradients of its parameters outweigh its activations"
    batch = {"x": noise(2, 3, 64, 64)}
    return Row(f"{kind} {name}", blocks, make, lambda: batch, kind, saves=saves, note=note)


SMALL_UNET = {"sample_size": 16, "block_out_channels": (8, 16), "norm_num_groups": 4}
SMALL_TRANSFORMER = {
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "in_channels": 4,
    "num_layers": 3,
    "sample_size": 16,
    "patch_size": 2,
}
SMALL_AUTOENCODER = {
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}
AUTOENCODER = (
    "ResnetBlock2D: 2 encoder.down_blocks.*.resnets.*, 2 encoder.mid_block.resnets.*, "
    "4 decoder.up_blocks.*.resnets.*, 2 decoder.mid_block.resnets.*; "
    "Attention: 1 encoder.mid_block.attentions.*, 1 decoder.mid_block.attentions.*"
)

OTHERS = [
    diffusers_row(
        "UNet2DModel",
        "ResnetBlock2D: 4 down_blocks.*.resnets.*, 6 up_blocks.*.resnets.*, 2 mid_block.resnets.*; "
        "Attention: 2 down_blocks.*.attentions.*, 3 up_blocks.*.attentions.*, "
        "1 mid_block.attentions.*",
        SMALL_UNET
        | {
            "layers_per_block": 2,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 8,
        },
        lambda: {"sample": noise(4, 3, 16, 16), "timestep": 5},
    ),
    diffusers_row(
        "UNet2DConditionModel",
        "BasicTransformerBlock: 1 down_blocks.*.attentions.*.transformer_blocks.*, "
        "2 up_blocks.*.attentions.*.transformer_blocks.*, "
        "1 mid_block.attentions.*.transformer_blocks.*; "
        "ResnetBlock2D: 2 down_blocks.*.resnets.*, 4 up_blocks.*.resnets.*, 2 mid_block.resnets.*",
        SMALL_UNET
        | {
            "layers_per_block": 1,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "attention_head_dim": 4,
            "cross_attention_dim": 16,
        },
        lambda: {
            "sample": noise(4, 4, 16, 16),
            "timestep": 5,
            "encoder_hidden_states": noise(4, 6, 16),
        },
    ),
    diffusers_row(
        "UNet3DConditionModel",
        "BasicTransformerBlock: 1 transformer_in.transformer_blocks.*, "
        "1 down_blocks.*.attentions.*.transformer_blocks.*, "
        "1 down_blocks.*.temp_attentions.*.transformer_blocks.*, "
        "2 up_blocks.*.attentions.*.transformer_blocks.*, "
        "2 up_blocks.*.temp_attentions.*.transformer_blocks.*, "
        "1 mid_block.attentions.*.transformer_blocks.*, "
        "1 mid_block.temp_attentions.*.transformer_blocks.*; "
        "ResnetBlock2D: 2 down_blocks.*.resnets.*, 4 up_blocks.*.resnets.*, 2 mid_block.resnets.*; "
        "TemporalConvLayer: 2 down_blocks.*.temp_convs.*, 4 up_blocks.*.temp_convs.*, "
        "2 mid_block.temp_convs.*",
        SMALL_UNET
        | {
            "layers_per_block": 1,
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
            "attention_head_dim": 4,
            "cross_attention_dim": 16,
        },
        lambda: {
            "sample": noise(2, 4, 3, 8, 8),
            "timestep": 5,
            "encoder_hidden_states": noise(2, 6, 16),
        },
    ),
    diffusers_row(
        "DiTTransformer2DModel",
        "BasicTransformerBlock: 3 transformer_blocks.*",
        SMALL_TRANSFORMER | {"norm_num_groups": 4, "num_embeds_ada_norm": 10},
        lambda: {
            "hidden_states": noise(4, 4, 16, 16),
            "timestep": torch.arange(4),
            "class_labels": torch.arange(4),
        },
        ratio=None,
        note="the model calls a part of block 0 once more by itself",
    ),
    diffusers_row(
        "PixArtTransformer2DModel",
        "BasicTransformerBlock: 3 transformer_blocks.*",
        SMALL_TRANSFORMER
        | {"norm_num_groups": 4, "cross_attention_dim": 32, "caption_channels": 16},
        lambda: {
            "hidden_states": noise(4, 4, 16, 16),
            "timestep": torch.arange(4),
            "encoder_hidden_states": noise(4, 6, 16),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
    ),
    diffusers_row(
        "SD3Transformer2DModel",
        "JointTransformerBlock: 3 transformer_blocks.*",
        SMALL_TRANSFORMER
        | {
            "joint_attention_dim": 32,
            "caption_projection_dim": 32,
            "pooled_projection_dim": 16,
            "out_channels": 4,
            "pos_embed_max_size": 16,
        },
        lambda: {
            "hidden_states": noise(4, 4, 16, 16),
            "encoder_hidden_states": noise(4, 6, 32),
            "pooled_projections": noise(4, 16),
            "timestep": torch.arange(4),
        },
    ),
    diffusers_row(
        "FluxTransformer2DModel",
        "FluxTransformerBlock: 2 transformer_blocks.*; "
        "FluxSingleTransformerBlock: 2 single_transformer_blocks.*",
        {
            "patch_size": 1,
            "in_channels": 4,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 16,
            "axes_dims_rope": (4, 4, 8),
        },
        lambda: {
            "hidden_states": noise(4, 64, 4),
            "encoder_hidden_states": noise(4, 6, 32),
            "pooled_projections": noise(4, 16),
            "timestep": torch.ones(4),
            "img_ids": torch.zeros(64, 3),
            "txt_ids": torch.zeros(6, 3),
        },
    ),
    diffusers_row(
        "SanaTransformer2DModel",
        "SanaTransformerBlock: 3 transformer_blocks.*",
        SMALL_TRANSFORMER
        | {
            "out_channels": 4,
            "num_cross_attention_heads": 4,
            "cross_attention_head_dim": 8,
            "cross_attention_dim": 32,
            "caption_channels": 16,
        },
        lambda: {
            "hidden_states": noise(4, 4, 16, 16),
            "encoder_hidden_states": noise(4, 6, 16),
            "timestep": torch.arange(4),
        },
    ),
    diffusers_row(
        "WanTransformer3DModel",
        "WanTransformerBlock: 3 blocks.*",
        {
            "patch_size": (1, 2, 2),
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 16,
            "freq_dim": 16,
            "ffn_dim": 48,
            "num_layers": 3,
        },
        lambda: {
            "hidden_states": noise(2, 4, 4, 16, 16),
            "timestep": torch.arange(2),
            "encoder_hidden_states": noise(2, 6, 16),
        },
    ),
    diffusers_row(
        "AutoencoderKL",
        AUTOENCODER,
        SMALL_AUTOENCODER,
        lambda: {"sample": noise(2, 3, 32, 32)},
    ),
    diffusers_row(
        "VQModel",
        AUTOENCODER,
        SMALL_AUTOENCODER | {"num_vq_embeddings": 16},
        lambda: {"sample": noise(2, 3, 32, 32)},
    ),
    diffusers_row(
        "AutoencoderTiny",
        "AutoencoderTinyBlock: 3 encoder.layers.*, 3 decoder.layers.*",
        {
            "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8),
            "num_encoder_blocks": (1, 2),
            "num_decoder_blocks": (2, 1),
        },
        lambda: {"sample": noise(2, 3, 32, 32)},
        ratio=None,
        note="it rounds its latents, so the encoder has no gradient and is not recomputed",
    ),
    diffusers_row(
        "UVit2DModel",
        "ConvNextBlock: 1 down_block.res_blocks.*, 1 up_block.res_blocks.*; "
        "SkipFFTransformerBlock: 1 down_block.attention_blocks.*, 1 up_block.attention_blocks.*; "
        "BasicTransformerBlock: 3 transformer_layers.*",
        {
            "hidden_size": 32,
            "encoder_hidden_size": 32,
            "cond_embed_dim": 8,
            "block_out_channels": 32,
            "num_res_blocks": 1,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "codebook_size": 16,
            "vocab_size": 17,
            "micro_cond_encode_dim": 4,
            "micro_cond_embed_dim": 20,
            "sample_size": 8,
        },
        lambda: {
            "input_ids": torch.arange(256).view(4, 8, 8) % 16,
            "encoder_hidden_states": noise(4, 6, 32),
            "pooled_text_emb": noise(4, 8),
            "micro_conds": noise(4, 5),
        },
    ),
    picture_row(TIMM, "resnet10t", "BasicBlock: 4 layer*.*", saves=False),
    picture_row(
        TIMM,
        "convnext_atto",
        "ConvNeXtBlock: 6 stages.*.blocks.*",
        depths=(1, 2, 2, 1),
        dims=(8, 8, 16, 16),
    ),
    picture_row(
        TIMM,
        "mobilenetv3_small_050",
        "DepthwiseSeparableConv: 1 blocks.*.*; InvertedResidual: 10 blocks.*.*",
    ),
    picture_row(
        TIMM,
        "efficientnet_lite0",
        "DepthwiseSeparableConv: 1 blocks.*.*; InvertedResidual: 15 blocks.*.*",
    ),
    picture_row(
        TIMM,
        "densenet121",
        "DenseLayer: 8 features.denseblock*.denselayer*",
        growth_rate=4,
        block_config=(2, 2, 2, 2),
    ),
    picture_row(
        TIMM,
        "vit_tiny_patch16_224",
        "Block: 3 blocks.*",
        img_size=64,
        patch_size=8,
        embed_dim=32,
        depth=3,
        num_heads=4,
    ),
    picture_row(
        TIMM,
        "swin_tiny_patch4_window7_224",
        "SwinTransformerBlock: 4 layers.*.blocks.*",
        img_size=64,
        window_size=4,
        embed_dim=16,
        depths=(2, 2),
        num_heads=(2, 4),
    ),
    picture_row(TORCHVISION, "resnet18", "BasicBlock: 8 layer*.*"),
    picture_row(TORCHVISION, "mobilenet_v2", "InvertedResidual: 17 features.*", width_mult=0.25),
    picture_row(TORCHVISION, "shufflenet_v2_x0_5", "InvertedResidual: 16 stage*.*"),
    picture_row(TORCHVISION, "mnasnet0_5", "_InvertedResidual: 16 layers.*.*"),
    picture_row(TORCHVISION, "squeezenet1_1", "Fire: 8 features.*"),
]
