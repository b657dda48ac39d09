"""Train a model with partial activation checkpointing, and read the peak memory of each epoch.

    python examples/train.py                                    # every second block
    python examples/train.py checkpoint.every_n=4 checkpoint.offload=true
    python examples/train.py checkpoint=none                    # plain training, to compare
    python examples/train.py strategy=ddp strategy.every_n=4 trainer.devices=2
    python examples/train.py model=vit data=digits
    python examples/train.py -m checkpoint.every_n=1,2,4        # one run each

`--help` lists the groups, `--cfg job` prints all keys. Everything that a run writes lies in
`outputs/DATE/TIME/`; the metrics in `csv/metrics.csv`.
"""

import hydra
import lightning as L
from hydra.utils import instantiate
from omegaconf import DictConfig
from report import without_clutter

from lightning_ckpt.config import check


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def main(config: DictConfig) -> float | None:
    """Train as `config` says; returns the last validation loss, for a sweeper to minimise."""
    check(config)
    L.seed_everything(config.seed, verbose=False)
    callbacks = [
        *build_all({"checkpoint": config.get("checkpoint")}),
        *build_all(config.get("callbacks")),
    ]
    loggers = build_all(config.get("logger"))
    table = build_all({"table": config.get("table")})
    engine = {"strategy": instantiate(config.strategy)} if config.get("strategy") else {}
    with without_clutter():
        trainer = instantiate(
            config.trainer, callbacks=callbacks, logger=[*loggers, *table], **engine
        )
        data = instantiate(config.data)
        model = instantiate(config.model)
        trainer.fit(model, data, ckpt_path=config.ckpt_path)
    for end in table:
        end.show()
    loss = trainer.callback_metrics.get("val/loss")
    return None if loss is None else loss.item()


def build_all(nodes: DictConfig | dict | None) -> list:
    """One object for each entry of a dict of configs; null and empty entries are passed over."""
    return [instantiate(node) for node in (nodes or {}).values() if node]


if __name__ == "__main__":
    main()
