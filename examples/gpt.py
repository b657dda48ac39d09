"""A small decoder-only language model in plain torch (pre-norm, learned positions, SDPA)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from training import Training


class Attention(nn.Module):
    """Self-attention through torch's fused kernel.

    Args:
        width: D, size of the residual stream.
        num_heads: H, a divisor of D.
        is_causal: each position sees itself and what is before it; else all positions.
    """

    def __init__(self, width: int, num_heads: int, is_causal: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.is_causal = is_causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # (B, T, 3, H, D/H)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (B, H, T, D/H)
        x = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)  # (B, H, T, D/H)
        return self.out(x.transpose(1, 2).flatten(-2))  # (B, T, D)


class Block(nn.Module):
    """One transformer block, (B, T, D) to (B, T, D): the unit that is checkpointed."""

    def __init__(self, width: int, num_heads: int, dropout: float, is_causal: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, is_causal)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(Training):
    """Predicts each next token of a sequence.

    Args:
        num_layers, width, num_heads, dropout: shape of the stack of blocks.
        vocab_size: V, number of different tokens.
        sequence_length: longest input T, in tokens.
        learning_rate, weight_decay: of AdamW.
    """

    def __init__(
        self,
        num_layers: int,
        width: int,
        num_heads: int,
        dropout: float,
        vocab_size: int,
        sequence_length: int,
        learning_rate: float,
        weight_decay: float,
    ) -> None:
        super().__init__(learning_rate, weight_decay)
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.position_embedding = nn.Embedding(sequence_length, width)
        self.blocks = nn.ModuleList(
            Block(width, num_heads, dropout, is_causal=True) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.apply(_small_weights)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)  # (T,)
        x = self.token_embedding(tokens) + self.position_embedding(positions)  # (B, T, D)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # (B, T, V)

    def loss(self, batch: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token; `batch` is (B, T + 1) token ids."""
        logits = self(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def _small_weights(module: nn.Module) -> None:
    """GPT-2's scale, so that the first loss is that of a uniform guess."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
