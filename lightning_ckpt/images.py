"""Send a picture to those loggers that take pictures."""

from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CometLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import Logger


def send_picture(logger: Logger, name: str, path: Path, step: int) -> bool:
    """Send the PNG file at `path`.

    Returns:
        Whether `logger` takes pictures.
    """
    # A logger of the user's own need not have one.
    experiment: Any = getattr(logger, "experiment", None)
    if isinstance(logger, TensorBoardLogger):
        experiment.add_image(name, _pixels(path), step, dataformats="HWC")
    elif isinstance(logger, WandbLogger):
        logger.log_image(name, [str(path)], step)
    elif isinstance(logger, CometLogger):
        experiment.log_image(str(path), name=name, step=step)
    elif isinstance(logger, MLFlowLogger):
        experiment.log_artifact(logger.run_id, str(path))
    else:
        return False
    return True


def _pixels(path: Path) -> Any:
    """(height, width, 3) of bytes."""
    from matplotlib.image import imread

    return (255 * imread(path)[..., :3]).round().astype("uint8")
