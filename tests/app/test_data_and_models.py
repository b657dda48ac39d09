"""The examples' data are split and cut rightly, and their models see no future."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

TEXT = {
    "max_bytes": None,
    "sequence_length": 8,
    "batch_size": 2,
    "val_fraction": 0.25,
    "num_workers": 0,
    "seed": 1,
}


def test_windows_predict_each_byte_once() -> None:
    from text import Windows

    windows = Windows(torch.arange(26, dtype=torch.uint8), sequence_length=8)
    targets = torch.cat([window[1:] for window in (windows[0], windows[1], windows[2])])
    assert len(windows) == 3
    assert torch.equal(targets, torch.arange(1, 25))


def test_validation_text_is_the_end_and_is_not_trained_on(tmp_path: Path) -> None:
    from text import Text

    file = tmp_path / "text.bin"
    file.write_bytes(bytes(range(200)))
    data = Text(path=str(file), **TEXT)
    data.setup("fit")
    train = torch.cat([batch.flatten() for batch in data.train_dataloader()])
    val = torch.cat([batch.flatten() for batch in data.val_dataloader()])
    assert train.max() < 150 <= val.min()
    assert train.dtype == torch.int64


def test_folder_is_read_in_order_and_hidden_files_are_not(tmp_path: Path) -> None:
    from text import read_text

    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "x.txt").write_bytes(b"second")
    (tmp_path / "a.txt").write_bytes(b"first ")
    (tmp_path / ".git" / "y").write_bytes(b"never")
    assert read_text(str(tmp_path), None) == b"first second"
    assert read_text(str(tmp_path), 3) == b"fir"


def test_default_text_is_the_standard_library() -> None:
    from text import find_files

    names = [file.name for file in find_files(None)]
    assert {"argparse.py", "typing.py"} <= set(names)
    assert names == sorted(names)


def test_digits_are_split_once() -> None:
    pytest.importorskip("sklearn")
    from digits import Digits

    data = Digits(batch_size=64, val_fraction=0.2, num_workers=0, seed=1)
    data.setup("fit")
    train, val = set(data.train_set.indices), set(data.val_set.indices)
    assert not train & val
    assert len(train) + len(val) == 1797
    images, classes = next(iter(data.train_dataloader()))
    assert images.shape == (64, 1, 8, 8)
    assert (images.min(), images.max(), classes.dtype) == (0, 1, torch.int64)


def test_gpt_sees_no_future() -> None:
    from gpt import GPT

    torch.manual_seed(0)
    model = GPT(2, 16, 2, 0.0, 256, 8, 0.1, 0.0)
    tokens = torch.randint(0, 256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] += 1 if changed[0, 5] < 255 else -1
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-6)
    assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-6)
    assert abs(model.loss(torch.randint(0, 256, (4, 9))).item() - 5.545) < 0.1  # ln 256


def test_hf_directory_is_loaded_with_and_without_weights(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from hf_causal_lm import HFCausalLM

    arguments = {"sequence_length": 16, "learning_rate": 0.1, "weight_decay": 0.0}
    config = {"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 256}
    first = HFCausalLM(config, **arguments)
    first.model.save_pretrained(tmp_path)
    loaded = HFCausalLM(str(tmp_path), **arguments)
    (tmp_path / "model.safetensors").unlink()
    fresh = HFCausalLM(str(tmp_path), **arguments)

    weight = first.model.transformer.wte.weight
    assert torch.equal(loaded.model.transformer.wte.weight, weight)
    assert not torch.equal(fresh.model.transformer.wte.weight, weight)
    assert loaded.model.training  # `from_pretrained` gives eval mode
