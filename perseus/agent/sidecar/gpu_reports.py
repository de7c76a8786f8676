"""What went wrong with the GPUs of trainers that are connected: told to the coordinator on every stream.

Each thing is told once on a stream; the coordinator's log keeps it.
"""

from perseus.agent.link.computation import Rank
from perseus.agent.rank.messages import GpuErrorReport
from perseus.agent.sidecar.vitals import Vitals
from perseus.agent.stream.coordinator import Coordinator

# Of one trainer's GPU; a text may have a figure in it, and so be another every time.
_MOST_REPORTS = 16


class GpuReports:
    """The reports of an agent's trainers, from a trainer's coming to its going; `vitals` counts them."""

    def __init__(self, coordinator: Coordinator, vitals: Vitals) -> None:
        self._coordinator = coordinator
        self._vitals = vitals
        self._reports: dict[Rank, list[GpuErrorReport]] = {}

    def begin(self, rank: Rank) -> None:
        """A rank's trainer is here."""
        self._reports[rank] = []

    def end(self, rank: Rank) -> None:
        """It is gone: what the coordinator could not be told yet is kept for the next stream."""
        self._coordinator.say_next(self._reports.pop(rank))

    def has_any(self, rank: Rank) -> bool:
        """Whether something went wrong with a trainer's GPU."""
        return bool(self._reports.get(rank))

    def of(self, rank: Rank) -> list[GpuErrorReport]:
        """Those of the trainer that is here now: what is reported later with them is of no other."""
        return self._reports.get(rank, [])

    def report(self, report: GpuErrorReport, reports: list[GpuErrorReport]) -> None:
        """Let the coordinator know, once; of a trainer that has gone, too."""
        self._vitals.note_error(report.gpu_uuid, report.reason)
        if reports is not self._reports.get(report.rank):
            self._coordinator.say(report)
            self._coordinator.say_next([report])  # where no stream is open
        elif report not in reports:
            reports.append(report)
            del reports[:-_MOST_REPORTS]
            self._coordinator.say(report)

    def say_again(self, rank: Rank) -> None:
        """Say all there is of a rank's GPU, to a coordinator that may not know it."""
        for report in self._reports.get(rank, []):
            self._coordinator.say(report)

    def say_all_again(self) -> None:
        """Say all there is, on a stream that is new."""
        for rank in self._reports:
            self.say_again(rank)
