"""Small models of ten shapes, each with a batch. They need transformers 5."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]


def text(length: int = 128, vocabulary: int = 512, batch: int = 4) -> Batch:
    tokens = torch.randint(3, vocabulary, (batch, length))
    return {"input_ids": tokens, "labels": tokens}


def images(size: int = 64, batch: int = 4) -> Batch:
    return {
        "pixel_values": torch.randn(batch, 3, size, size),
        "labels": torch.randint(2, (batch,)),
    }


class UNetBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.GroupNorm(4, channels),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(4, channels),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class UNet(nn.Module):
    def __init__(self, channels: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.down = nn.ModuleList(UNetBlock(channels) for _ in range(depth))
        self.up = nn.ModuleList(UNetBlock(channels) for _ in range(depth))

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        x, skipped = self.stem(pixel_values), []
        for block in self.down:
            x = block(x)
            skipped.append(x)
            x = nn.functional.avg_pool2d(x, 2)
        for block, skip in zip(self.up, reversed(skipped), strict=True):
            x = block(nn.functional.interpolate(x, scale_factor=2.0) + skip)
        return x.pow(2).mean()


def shapes() -> dict[str, Callable[[], tuple[nn.Module, Batch]]]:
    import transformers as hf

    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    llama = {**sizes, "intermediate_size": 172, "vocab_size": 512, "use_cache": False}
    vision = {**sizes, "intermediate_size": 256, "image_size": 64, "patch_size": 8}

    def llava() -> tuple[nn.Module, Batch]:
        config = hf.LlavaConfig(
            vision_config=hf.CLIPVisionConfig(**vision),
            text_config=hf.LlamaConfig(**llama),
            image_token_index=1,
        )
        tokens = torch.randint(3, 512, (4, 128))
        tokens[:, :64] = 1
        pixels = torch.randn(4, 3, 64, 64)
        batch = {"input_ids": tokens, "pixel_values": pixels, "labels": tokens}
        return hf.LlavaForConditionalGeneration(config), batch

    def whisper() -> tuple[nn.Module, Batch]:
        config = hf.WhisperConfig(
            d_model=64, encoder_layers=4, decoder_layers=4, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256,
            vocab_size=512, num_mel_bins=16, max_source_positions=128, use_cache=False,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        )  # fmt: skip
        labels = torch.randint(3, 512, (4, 64))
        batch = {"input_features": torch.randn(4, 16, 256), "labels": labels}
        return hf.WhisperForConditionalGeneration(config), batch

    return {
        "GPT": lambda: (
            hf.GPT2LMHeadModel(
                hf.GPT2Config(n_embd=64, n_layer=6, n_head=4, vocab_size=512, use_cache=False)
            ),
            text(),
        ),
        "T5": lambda: (
            hf.T5ForConditionalGeneration(
                hf.T5Config(
                    d_model=64,
                    d_kv=16,
                    d_ff=256,
                    num_layers=4,
                    num_heads=4,
                    vocab_size=512,
                    decoder_start_token_id=0,
                    use_cache=False,
                )
            ),
            text(),
        ),
        "ViT": lambda: (hf.ViTForImageClassification(hf.ViTConfig(**vision)), images()),
        "Swin": lambda: (
            hf.SwinForImageClassification(
                hf.SwinConfig(
                    image_size=64,
                    patch_size=4,
                    embed_dim=32,
                    depths=[2, 4],
                    num_heads=[2, 4],
                    window_size=4,
                )
            ),
            images(),
        ),
        "ResNet": lambda: (
            hf.ResNetForImageClassification(
                hf.ResNetConfig(embedding_size=16, hidden_sizes=[32, 64], depths=[3, 3])
            ),
            images(),
        ),
        "MoE": lambda: (
            hf.MixtralForCausalLM(
                hf.MixtralConfig(
                    **llama, num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2
                )
            ),
            text(),
        ),
        "Whisper": whisper,
        "U-Net": lambda: (UNet(), images()),
        "LLaVA-like": llava,
        "Mamba": lambda: (
            hf.MambaForCausalLM(
                hf.MambaConfig(hidden_size=64, num_hidden_layers=4, vocab_size=512, use_cache=False)
            ),
            text(length=32),
        ),
    }
