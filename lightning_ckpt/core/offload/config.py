"""The user's words for offload as plain data."""

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

Target = Literal["host", "disk"]
Scope = Literal["inputs", "kept", "all"]

_WORDS = {"target": get_args(Target), "scope": get_args(Scope)}
_LEAST = {"min_bytes": 0, "prefetch": 0, "max_host_bytes": 1, "keep_last": 0}
_TARGETS = "True or 'host' (pinned memory of the host), 'disk' (files)"


@dataclass(frozen=True)
class OffloadConfig:
    """What waits for backward elsewhere than on the device, and where.

    Attributes:
        target: "host", in pinned memory of the host; "disk", in a private file without a name.
        scope: "inputs", what checkpointed blocks hold; "kept", what the blocks hold that are not
            checkpointed; "all", both.
        directory: where the file of "disk" lies; None: where temporary files lie (`TMPDIR`).
        min_bytes: smaller storages stay.
        prefetch: so many blocks ahead of backward their tensors are brought back. Each costs its
            tensors' bytes on the device, and hides a copy behind the compute of a block; with 0
            each block waits for its own copy.
        max_host_bytes: pinned memory at most, of this process. "host": what does not fit stays on
            the device; "disk": the training waits for the file. None: half of the memory that is
            free on the node, divided by its local ranks; for "disk" 2 GiB, if that is less.
        keep_last: so many of the last blocks of forward keep theirs on the device, since backward
            needs them first.

    Raises:
        TypeError: a value is of a wrong kind.
        ValueError: a value is impossible.
    """

    target: Target = "host"
    scope: Scope = "inputs"
    directory: str | None = None
    min_bytes: int = 256 * 1024
    prefetch: int = 1
    max_host_bytes: int | None = None
    keep_last: int = 1

    def __post_init__(self) -> None:
        for name, words in _WORDS.items():
            if getattr(self, name) not in words:
                raise ValueError(
                    f"offload {name}={getattr(self, name)!r} is not known; use one of "
                    f"{', '.join(map(repr, words))}"
                )
        for name, least in _LEAST.items():
            _check_number(name, getattr(self, name), least)
        if self.directory is not None and not isinstance(self.directory, str):
            raise TypeError(f"offload directory must be a str or None, got {self.directory!r}")
        if self.directory is not None and self.target != "disk":
            raise ValueError(
                f"offload directory={self.directory!r} is for target='disk', and the target is "
                f"{self.target!r}; drop one of the two"
            )


def _check_number(name: str, value: Any, least: int) -> None:
    if value is None and name == "max_host_bytes":
        return
    if isinstance(value, bool) or not isinstance(value, int):
        of_what = " of bytes" if name.endswith("bytes") else ""
        raise TypeError(f"offload {name} must be a whole number{of_what}, got {value!r}")
    if value < least:
        raise ValueError(f"offload {name} must be at least {least}, got {value}")


def read_offload(offload: Any) -> OffloadConfig | None:
    """The config that `offload` stands for; None: tensors stay on the device.

    Args:
        offload: a bool, a word, an `OffloadConfig`, or a dict of its fields.

    Raises:
        TypeError: it is none of these, or a field is of a wrong kind.
        ValueError: the word, or a field or its value, is not known.
    """
    if isinstance(offload, OffloadConfig):
        return offload
    if isinstance(offload, bool):
        return OffloadConfig() if offload else None
    if isinstance(offload, dict):
        return _from_dict(offload)
    if not isinstance(offload, str):
        raise TypeError(
            f"offload must be True, False, 'host', 'disk' or an OffloadConfig, got {offload!r}"
        )
    if offload not in _WORDS["target"]:
        raise ValueError(
            f"offload={offload!r} is not known; use {_TARGETS}, False (stay on the device), or an "
            "OffloadConfig"
        )
    return OffloadConfig(target=offload)  # type: ignore[arg-type]


def _from_dict(values: dict[str, Any]) -> OffloadConfig:
    known = [field.name for field in fields(OffloadConfig)]
    for name in values:
        if name not in known:
            raise ValueError(f"offload has no {name!r}; it takes {', '.join(known)}")
    return OffloadConfig(**values)
