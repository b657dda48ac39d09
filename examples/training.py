"""What all models of the examples share: how a loss is logged and minimised."""

from typing import Any

import lightning as L
import torch
from torch import Tensor


class Training(L.LightningModule):
    """AdamW on the loss of a batch; a subclass says what that loss is.

    Logs `train/loss` and `val/loss`, the means over each epoch.

    Args:
        learning_rate, weight_decay: of AdamW.
    """

    def __init__(self, learning_rate: float, weight_decay: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss, on_step=False, on_epoch=True)
        self.log("loss", loss, prog_bar=True, logger=False)  # of this step, in the bar
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            self.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay
        )
