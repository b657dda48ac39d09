"""The configs of `conf/`, for Hydra, and what is wrong with one.

Importing this module registers the schemas with Hydra, under `lightning_ckpt/` in its ConfigStore;
the YAML files give the values. Hydra itself refuses a key that does not exist and a value of the
wrong type; `check` refuses the rest. This is the one module that names Hydra.
"""

import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any

import torch
from hydra.core.config_store import ConfigStore
from hydra.utils import get_method
from omegaconf import DictConfig, OmegaConf

from lightning_ckpt.schemas import (
    DataConfig,
    DigitsConfig,
    FullCheckpointConfig,
    GPTConfig,
    HFCausalLMConfig,
    ModelConfig,
    OffloadGroupConfig,
    PartialCheckpointConfig,
    PeakMemoryConfig,
    PlanCheckpointConfig,
    PlanConfig,
    TextConfig,
    TrainerConfig,
    ViTConfig,
)

# Keys that `hydra.utils.instantiate` reads itself.
_HYDRA_KEYS = {"_target_", "_args_", "_convert_", "_partial_", "_recursive_"}


def check(config: DictConfig) -> None:
    """Refuse what would fail later, or silently do something else, before anything is built.

    Args:
        config: the whole composed config of an app; groups that it lacks are passed over.

    Raises:
        ValueError: a key that its target does not take, a value out of bounds, or values that
            contradict one another; the message names the key.
    """
    _check_pair(config)
    _check_budget(config)
    for group in ("checkpoint", "strategy", "trainer", "model", "data"):
        _check_values(group, config.get(group))
    for key, node in _targets(config):
        _check_keys(key, node)
        if key.startswith("callbacks."):
            _check_values(key, node)


def _targets(config: DictConfig) -> Iterator[tuple[str, DictConfig]]:
    """Every node that stands for an object, with its key."""
    for group in ("checkpoint", "strategy", "trainer", "model", "data", "table"):
        if config.get(group):
            yield group, config[group]
    for group in ("callbacks", "logger"):
        for name, node in (config.get(group) or {}).items():
            if node is not None:
                yield f"{group}.{name}", node


def _check_keys(key: str, node: Any) -> None:
    if not isinstance(node, DictConfig) or "_target_" not in node:
        raise ValueError(f"{key}={node} has no _target_, so it says of no class what to make")
    parameters = inspect.signature(get_method(node._target_)).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in set(map(str, node)) - _HYDRA_KEYS - set(parameters):
        near = get_close_matches(name, parameters, n=1)
        hint = f"; did you mean {key}.{near[0]}?" if near else f"; it takes {', '.join(parameters)}"
        raise ValueError(f"{key}.{name} is not known to {node._target_}{hint}")


def _check_values(group: str, node: DictConfig | None) -> None:
    """Make the plain dataclass, whose `__post_init__` looks at the values."""
    schema = OmegaConf.get_type(node) if node else None
    if not is_dataclass(schema):
        return
    values = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    assert isinstance(values, dict)
    try:
        schema(**{field.name: values[field.name] for field in fields(schema)})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{group}.{error}") from None


def _check_budget(config: DictConfig) -> None:
    """A share of a device's memory needs a device."""
    accelerator = (config.get("trainer") or {}).get("accelerator")
    is_cpu = accelerator == "cpu" or (
        accelerator == "auto" and not torch.accelerator.is_available()
    )
    for group in ("checkpoint", "strategy"):
        budget = (config.get(group) or {}).get("budget")
        if is_cpu and (budget == "auto" or isinstance(budget, float)):
            raise ValueError(
                f"{group}.budget={budget} is of a device's memory, and this is cpu; give bytes, "
                f"such as {group}.budget=4GiB"
            )


def _check_pair(config: DictConfig) -> None:
    """The model takes what the data give."""
    if not (config.get("model") and config.get("data")):
        return
    model: Any = OmegaConf.get_type(config.model)
    data: Any = OmegaConf.get_type(config.data)
    if not (issubclass(model, ModelConfig) and issubclass(data, DataConfig)):
        return  # an app's own models and data
    if model.takes != data.gives:
        raise ValueError(
            f"model and data do not fit: {config.model._target_} takes {model.takes}, "
            f"{config.data._target_} gives {data.gives}; use model=gpt or model=hf_causal_lm with "
            "data=text, model=vit with data=digits"
        )
    if model.takes == "text" and config.model.sequence_length < config.data.sequence_length:
        raise ValueError(
            f"model.sequence_length={config.model.sequence_length} is below "
            f"data.sequence_length={config.data.sequence_length}; the model cannot read the samples"
        )


_SCHEMAS = {
    "partial_checkpoint": PartialCheckpointConfig,
    "partial_checkpoint_strategy": PlanConfig,
    "full_checkpoint": FullCheckpointConfig,
    "plan_checkpoint": PlanCheckpointConfig,
    "offload": OffloadGroupConfig,
    "trainer": TrainerConfig,
    "gpt": GPTConfig,
    "vit": ViTConfig,
    "hf_causal_lm": HFCausalLMConfig,
    "text": TextConfig,
    "digits": DigitsConfig,
    "peak_memory": PeakMemoryConfig,
}
for _name, _schema in _SCHEMAS.items():
    ConfigStore.instance().store(group="lightning_ckpt", name=_name, node=_schema)
