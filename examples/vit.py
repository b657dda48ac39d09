"""A small vision transformer in plain torch."""

import torch
from gpt import Block
from torch import Tensor, nn
from torch.nn import functional as F
from training import Training


class ViT(Training):
    """Classifies square images.

    Args:
        num_layers, width, num_heads, dropout: shape of the stack of blocks.
        patch_size: P, side of a patch in pixels, a divisor of `image_size`.
        learning_rate, weight_decay: of AdamW.
        image_size: S, side of an image in pixels.
        num_channels: C of an image.
        num_classes: K.
    """

    def __init__(
        self,
        num_layers: int,
        width: int,
        num_heads: int,
        dropout: float,
        patch_size: int,
        learning_rate: float,
        weight_decay: float,
        image_size: int = 8,
        num_channels: int = 1,
        num_classes: int = 10,
    ) -> None:
        super().__init__(learning_rate, weight_decay)
        self.patches = nn.Conv2d(num_channels, width, kernel_size=patch_size, stride=patch_size)
        num_patches = (image_size // patch_size) ** 2
        self.position_embedding = nn.Parameter(0.02 * torch.randn(num_patches, width))
        self.blocks = nn.ModuleList(
            Block(width, num_heads, dropout, is_causal=False) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)  # (B, C, S, S) -> (B, T, D)
        x = x + self.position_embedding
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(dim=1)))  # (B, K)

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Mean cross-entropy; `batch` is images (B, C, S, S) and classes (B,)."""
        images, classes = batch
        return F.cross_entropy(self(images), classes)
