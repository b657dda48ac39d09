"""Train the small GPT from LightningCLI, on one device or on many.

    python examples/cli.py fit --trainer.strategy partial_checkpoint_ddp --trainer.devices 2
    python examples/cli.py fit \\
        --trainer.strategy lightning_ckpt.PartialCheckpointDDPStrategy \\
        --trainer.strategy.every_n 4
    python examples/cli.py fit \\
        --trainer.callbacks+=lightning_ckpt.PartialCheckpoint --trainer.callbacks.every_n=4

`fit --help` lists all arguments, `fit --print_config` writes them as YAML for `--config`. Needs
`pip install "lightning-ckpt[cli]"`.
"""

from gpt import GPT
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from text import Text

import lightning_ckpt  # noqa: F401  registers the names of the strategies

DEFAULTS = {
    "model.num_layers": 8,
    "model.width": 64,
    "model.num_heads": 4,
    "model.dropout": 0.0,
    "model.vocab_size": 256,  # one token per byte
    "model.learning_rate": 0.003,
    "model.weight_decay": 0.1,
    "data.path": None,  # the sources of Python's standard library
    "data.max_bytes": 8_000_000,
    "data.sequence_length": 256,
    "data.batch_size": 8,
    "data.val_fraction": 0.1,
    "data.num_workers": 0,
    "data.seed": 1,
    "trainer.max_epochs": 2,
    "trainer.limit_train_batches": 40,
    "trainer.limit_val_batches": 4,
}


class CLI(LightningCLI):
    """The GPT, with a default for each argument."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.sequence_length", "model.sequence_length")
        parser.set_defaults(DEFAULTS)


def main() -> CLI:
    """Do what the command line says."""
    return CLI(GPT, Text, save_config_callback=None)


if __name__ == "__main__":
    main()
