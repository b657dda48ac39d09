"""What each plan would cost, without a device and without computing anything.

    python examples/plan.py                                     # the default model and data
    python examples/plan.py model.num_layers=48 model.width=2048 data.batch_size=64 \\
        'budgets=[48GiB,80GiB]'
    python examples/plan.py may_offload=true 'budgets=[20MiB]'  # what offload would buy
    python examples/plan.py picture=plans.png

The model is built on the meta device, so it takes no memory; one batch of the data says the shapes.
Prints a table of peak memory against step time (plain training is 1): for intervals, for the
planner's front (`all_rows=true`: all of both), and for its choice within each budget.
"""

import hydra
import lightning as L
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from lightning_ckpt import draw_estimate, estimate, print_estimate
from lightning_ckpt.config import check


@hydra.main(version_base="1.3", config_path="../conf", config_name="plan")
def main(config: DictConfig) -> None:
    """Estimate as `config` says."""
    check(config)
    L.seed_everything(config.seed, verbose=False)
    data = instantiate(config.data)
    data.prepare_data()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    with torch.device("meta"):
        model = instantiate(config.model)
    found = estimate(
        model,
        batch,
        config.budgets,
        offload=config.may_offload,
        link_bytes_per_second=config.link_bytes_per_second,
    )
    print_estimate(found, all_rows=config.all_rows)
    if config.picture:
        draw_estimate(found, config.picture)
        print(f"Picture: {config.picture}")


if __name__ == "__main__":
    main()
