"""The bases of emulated clusters: which problems wait, how long iterations take, what ranks report."""

from collections.abc import Collection, Iterable

from perseus.service.domain.commands import Command, Refine, Solve
from perseus.service.domain.inputs import TelemetryArrived, Tick
from perseus.service.domain.model import JobState
from perseus.service.domain.specification import Coordinates
from perseus.solver import Refinement
from tests.service.service_fakes import Cluster, FakeRank


class PatientCluster(Cluster):
    """A cluster whose problems, and plans to be made, wait in `waiting`; while that is None, none waits."""

    waiting: list[Solve | Refine] | None = None

    def carry_out(self, commands: Iterable[Command]) -> None:
        rest = list(commands)
        if self.waiting is not None:
            self.waiting += [command for command in rest if isinstance(command, Solve | Refine)]
            rest = [command for command in rest if not isinstance(command, Solve | Refine)]
        super().carry_out(rest)

    def refinements(self) -> list[Refinement]:
        """Return the plans that wait to be made."""
        return [command.refinement for command in self.waiting or () if isinstance(command, Refine)]

    def problems(self) -> list[Solve]:
        return [command for command in self.waiting or () if isinstance(command, Solve)]


class EmulatedCluster(PatientCluster):
    """All ranks run iterations in step; `silent` ones report nothing."""

    has_ticks = False
    """Whether ticks come while time passes, when they are due."""
    silent: Collection[Coordinates] = ()

    def iteration_time_s(self) -> float:
        """Return how long the iteration that has begun takes."""
        return 0.8

    def end(self, rank: FakeRank, duration_s: float) -> TelemetryArrived:
        """End a rank's iteration, and return its report."""
        return rank.end(duration_s)

    def run(self, count: int = 1) -> None:
        for _ in range(count):
            for rank in self.ranks.values():
                if (in_force := rank.begin()) is not None:
                    self.send(in_force)
            duration_s = self.iteration_time_s()
            self.pass_time(duration_s)
            for rank in self.ranks.values():
                reported = self.end(rank, duration_s)
                if rank.place not in self.silent:
                    self.send(reported)

    def run_until(self, state: JobState, limit: int = 200) -> None:
        for _ in range(limit):
            if self.machine.record.state is state:
                return
            self.run()
        raise AssertionError(f"{self.machine.record.state} after {limit} iterations, expected {state}")

    def pass_time(self, time_s: float) -> None:
        """Let time pass, with a tick every second in which one is due, as in a coordinator."""
        end_s = self.now_s + time_s
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + (1.0 if self.has_ticks else time_s))
            deadline_s = self.machine.run.next_deadline_s() if self.has_ticks else None
            if deadline_s is not None and deadline_s <= self.now_s:
                self.send(Tick())
