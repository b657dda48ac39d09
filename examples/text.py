"""Bytes of real text, cut into samples of one length."""

import sysconfig
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset[Tensor]):
    """Neighbouring stretches of a text that share no predicted byte.

    Args:
        text: (N,) uint8.
        sequence_length: T, number of bytes to predict; a sample has T + 1.
    """

    def __init__(self, text: Tensor, sequence_length: int) -> None:
        self.text = text
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        return max(len(self.text) - 1, 0) // self.sequence_length

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.sequence_length
        return self.text[start : start + self.sequence_length + 1].long()  # (T + 1,)


class Text(L.LightningDataModule):
    """Batches (B, T + 1) of byte values; the text's end is kept for validation.

    Args:
        path: a file; a folder, of which every file counts, in the order of their names; None: the
            sources of Python's standard library.
        max_bytes: read no more than this, None: all.
        sequence_length: T.
        batch_size: B.
        val_fraction: share of the text for validation.
        num_workers: processes that load batches.
        seed: of the order of the samples.
    """

    def __init__(
        self,
        path: str | None,
        max_bytes: int | None,
        sequence_length: int,
        batch_size: int,
        val_fraction: float,
        num_workers: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.path = path
        self.max_bytes = max_bytes
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.val_fraction = val_fraction
        self.num_workers = num_workers
        self.seed = seed

    def setup(self, stage: str) -> None:
        text = torch.frombuffer(read_text(self.path, self.max_bytes), dtype=torch.uint8)
        num_val = int(len(text) * self.val_fraction)
        self.train_set = Windows(text[: len(text) - num_val], self.sequence_length)
        self.val_set = Windows(text[len(text) - num_val :], self.sequence_length)
        if not (len(self.train_set) >= self.batch_size and len(self.val_set)):
            raise ValueError(
                f"data.path={self.path} holds {len(text)} bytes, too few for a batch of "
                f"data.batch_size={self.batch_size} samples of "
                f"data.sequence_length={self.sequence_length} bytes, and one for validation"
            )

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(
            self.train_set,
            self.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=self.num_workers,
            generator=torch.Generator().manual_seed(self.seed),
        )

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.val_set, self.batch_size, num_workers=self.num_workers)


def read_text(path: str | None, max_bytes: int | None) -> bytearray:
    """The bytes of all files, joined."""
    text = bytearray()
    for file in find_files(path):
        text += file.read_bytes()
        if max_bytes is not None and len(text) >= max_bytes:
            return text[:max_bytes]
    return text


def find_files(path: str | None) -> list[Path]:
    """The files that `path` stands for, sorted; hidden ones below a folder are left out."""
    if path is None:
        return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    root = Path(path)
    if root.is_file():
        return [root]
    return sorted(
        file
        for file in root.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(root).parts)
    )
