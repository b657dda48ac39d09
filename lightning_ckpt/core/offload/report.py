"""What an offload did, as plain data and as sentences."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_ckpt.core.offload.targets import Moved

_MIB = 2**20
_LITTLE = 0.1  # of the peak
_NOTHING = (
    "nothing was moved, so offload changes nothing here: the blocks save less than min_bytes each, "
    "there are no more of them than keep_last or none in scope, or what they save cannot be moved"
)


class PeakMoment(NamedTuple):
    """When a step's memory was highest.

    Attributes:
        phase: what ran then.
        peak_bytes: the peak.
        away_bytes: how much was elsewhere then.
    """

    phase: str
    peak_bytes: int
    away_bytes: int


@dataclass(frozen=True)
class OffloadReport:
    """What an offload did since it was put in force.

    Attributes:
        target: "host" or "disk".
        out_bytes: bytes copied to the target.
        in_bytes: bytes copied back. (What backward asks for while it is still here needs no copy.)
        stayed_bytes: bytes of saved tensors that stayed, by reason; a storage counts once in each
            stretch between two backward passes.
        asked_bytes: the most bytes that waited at the target at once.
        taken_bytes: the most bytes that the target took for them (pinned memory, or the file).
        num_ahead: storages fetched before backward asked for them.
        num_on_demand: storages fetched when backward asked for them.
        seconds_waited: time that the compute waited for a copy.
        staged_asked_bytes: for "disk" on a device: the most bytes that were in pinned host memory
            at once, on their way to the file or back.
        staged_taken_bytes: the pinned memory that was taken for them.
        out_link: the copies out that have ended, and the time that they themselves took (for
            "disk" on a device: from pinned memory to the file).
        in_link: the same of the copies back.
        peak: when the memory was highest, where that was watched.
    """

    target: str
    out_bytes: int = 0
    in_bytes: int = 0
    stayed_bytes: Mapping[str, int] = field(default_factory=dict)
    asked_bytes: int = 0
    taken_bytes: int = 0
    num_ahead: int = 0
    num_on_demand: int = 0
    seconds_waited: float = 0.0
    peak: PeakMoment | None = None
    staged_asked_bytes: int = 0
    staged_taken_bytes: int = 0
    out_link: Moved = field(default_factory=Moved)
    in_link: Moved = field(default_factory=Moved)

    @property
    def out_seconds(self) -> float:
        """Time that the copies out took which have ended."""
        return self.out_link.seconds

    @property
    def in_seconds(self) -> float:
        """Time that the copies back took which have ended."""
        return self.in_link.seconds

    def sentences(self) -> list[str]:
        """The report for a person."""
        lines = self._moved() if self.out_bytes else [_NOTHING]
        if self.stayed_bytes:
            reasons = (f"{_mib(n)} {reason}" for reason, n in sorted(self.stayed_bytes.items()))
            lines.append(f"what stayed: {', '.join(reasons)}")
        if self.out_bytes and self.peak is not None:
            lines.append(_sentence_of(self.peak, self.asked_bytes))
        return lines

    def _moved(self) -> list[str]:
        place = "pinned host memory" if self.target == "host" else "the file"
        lines = [
            f"{_mib(self.out_bytes)} moved to {self.target}, {_mib(self.in_bytes)} back "
            f"({self.num_ahead} fetched ahead, {self.num_on_demand} on demand); the compute waited "
            f"{self.seconds_waited * 1000:.1f} ms for copies",
            f"at most {_mib(self.asked_bytes)} were elsewhere at once; {place} took "
            f"{_mib(self.taken_bytes)}",
        ]
        if self.staged_taken_bytes:
            lines.append(
                f"at most {_mib(self.staged_asked_bytes)} were in pinned host memory at once, on "
                f"their way; it took {_mib(self.staged_taken_bytes)}"
            )
        return lines


def _sentence_of(moment: PeakMoment, most_away: int) -> str:
    sentence = (
        f"the peak, {_mib(moment.peak_bytes)}, came in {moment.phase}, while "
        f"{_mib(moment.away_bytes)} of at most {_mib(most_away)} were elsewhere"
    )
    was_lowered = moment.away_bytes > 0 and 2 * moment.away_bytes >= most_away
    if was_lowered:
        sentence += "; without offload it would have been higher by that"
    if was_lowered and moment.away_bytes >= _LITTLE * moment.peak_bytes:
        return sentence
    what, way_out = _dominating(moment.phase)
    return f"{sentence}: {what} the peak, and offload cannot lower it further; {way_out} can"


def _dominating(phase: str) -> tuple[str, str]:
    """What is most of a peak that offload lowers by little, and what lowers it more."""
    if "loss" in phase:
        return (
            "the logits and the loss dominate",
            "a loss that needs fewer logits at once, or smaller batches,",
        )
    if "backward" in phase:
        return (
            "one block's recompute, beside parameters and gradients, dominates",
            "smaller batches",
        )
    return "what runs there dominates", "smaller batches"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:.1f} MiB"
