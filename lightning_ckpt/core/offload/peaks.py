"""When a step's memory is highest: in forward, in the loss, or in the backward of which block."""

from collections.abc import Callable

from lightning_ckpt.core.offload.report import PeakMoment


class PeakWatch:
    """Asks for the peak whenever one phase of a step ends.

    Args:
        peak_bytes: the highest number of bytes so far; it never falls.
        away_bytes: how much is elsewhere now.
    """

    def __init__(self, peak_bytes: Callable[[], int], away_bytes: Callable[[], int]) -> None:
        self._peak_bytes = peak_bytes
        self._away_bytes = away_bytes
        self._highest = 0
        self._phase = "the forward"
        self._away = 0
        self.moment: PeakMoment | None = None

    def begin(self, phase: str) -> None:
        """The phase before has ended, and `phase` begins."""
        self.look()
        self._phase, self._away = phase, self._away_bytes()

    def look(self) -> None:
        """Note whether the peak was reached in this phase."""
        peak = self._peak_bytes()
        if peak > self._highest:
            self._highest = peak
            self.moment = PeakMoment(self._phase, peak, self._away)
