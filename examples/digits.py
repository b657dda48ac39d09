"""scikit-learn's handwritten digits; they come with the package, nothing is downloaded."""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, random_split


class Digits(L.LightningDataModule):
    """Batches of images (B, 1, 8, 8) in 0 .. 1 and their classes (B,).

    Args:
        batch_size: B.
        val_fraction: share of the 1797 images for validation.
        num_workers: processes that load batches.
        seed: of the split and of the order of the images.
    """

    def __init__(self, batch_size: int, val_fraction: float, num_workers: int, seed: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.val_fraction = val_fraction
        self.num_workers = num_workers
        self.seed = seed

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16  # (N, 1, 8, 8)
        dataset = TensorDataset(images, torch.tensor(digits.target))
        self.train_set, self.val_set = random_split(
            dataset,
            [1 - self.val_fraction, self.val_fraction],
            torch.Generator().manual_seed(self.seed),
        )

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(
            self.train_set,
            self.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=self.num_workers,
            generator=torch.Generator().manual_seed(self.seed),
        )

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.val_set, self.batch_size, num_workers=self.num_workers)
