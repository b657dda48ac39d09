"""Any causal language model of Hugging Face Transformers, without a network."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from training import Training
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig


class HFCausalLM(Training):
    """Predicts each next byte; the bytes are the token ids, no tokenizer is used.

    Args:
        config: a local directory with a `config.json`, whose weights are loaded if it holds any; or
            a dict of `model_type` and what differs from that type's default config.
        sequence_length: longest input T, in tokens.
        learning_rate, weight_decay: of AdamW.

    Raises:
        ValueError: a model type or key that Transformers does not know, fewer than 256 tokens, or
            fewer positions than `sequence_length`.
    """

    def __init__(
        self,
        config: str | dict[str, Any],
        sequence_length: int,
        learning_rate: float,
        weight_decay: float,
    ) -> None:
        super().__init__(learning_rate, weight_decay)
        hf_config = read_config(config)
        check_config(hf_config, sequence_length)
        if isinstance(config, str) and _holds_weights(config):
            self.model = AutoModelForCausalLM.from_pretrained(config, local_files_only=True)
            self.model.train()  # it comes in eval mode, and Lightning leaves it there
        else:
            self.model = AutoModelForCausalLM.from_config(hf_config)

    def loss(self, batch: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte; `batch` is (B, T + 1) token ids."""
        logits = self.model(input_ids=batch[:, :-1], use_cache=False).logits  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def read_config(config: str | dict[str, Any]) -> PretrainedConfig:
    """The Transformers config of a local directory, or of a model type with changes."""
    if isinstance(config, str):
        return AutoConfig.from_pretrained(config, local_files_only=True)
    changes = dict(config)
    model_type = changes.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        near = get_close_matches(model_type, list(CONFIG_MAPPING), n=3) or ["gpt2", "llama"]
        raise ValueError(
            f"model.config.model_type={model_type!r} is not known to the installed transformers; "
            f"nearest: {', '.join(near)}"
        )
    default = AutoConfig.for_model(model_type)
    # Transformers keeps a key that it does not know, and does nothing with it.
    for key in changes:
        if not hasattr(default, key):
            raise ValueError(f"model.config.{key} is not known to {type(default).__name__}")
    return AutoConfig.for_model(model_type, **changes)


def check_config(config: PretrainedConfig, sequence_length: int) -> None:
    """Refuse a model that could not read the text."""
    text_config = config.get_text_config()
    if text_config.vocab_size < 256:
        raise ValueError(
            f"model.config.vocab_size={text_config.vocab_size} is below 256; the tokens are bytes"
        )
    positions = getattr(text_config, "max_position_embeddings", None)
    if positions is not None and positions < sequence_length:
        raise ValueError(
            f"model.config.max_position_embeddings={positions} is below "
            f"data.sequence_length={sequence_length}"
        )


def _holds_weights(directory: str) -> bool:
    return any(any(Path(directory).glob(name)) for name in ("*.safetensors", "pytorch_model*.bin"))
