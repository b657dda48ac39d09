"""Every private Lightning name that we touch, and why. Each has a test that fails when it moves."""

from lightning.pytorch.strategies import Strategy


def checkpoints_by_itself(strategy: Strategy) -> bool:
    """Whether `strategy` was given `activation_checkpointing_policy` (only FSDP has it).

    The strategy keeps what it will pass to `apply_activation_checkpointing` and offers no public
    way to ask.
    """
    return bool(getattr(strategy, "_activation_checkpointing_kwargs", None))
