"""A notebook in place of an agent, for a framework hook's marks and registration."""

from typing import Any

from perseus.agent.link.computation import Computation, Kind

Identity = tuple[int, int, int]
"""(kind, microbatch, chunk) of a computation, as numbers on the wire."""


class Notebook:
    """Keeps marks and the registration (implements `Marks`)."""

    def __init__(self) -> None:
        self.registration: dict[str, Any] = {}
        self.iterations: list[list[Identity]] = []
        self.open: Identity | None = None
        self.is_finished = self.is_closed = False

    def notes(self) -> dict[str, Any]:
        """Return all of it, for a file."""
        left = {"is_finished": self.is_finished, "is_closed": self.is_closed}
        return {"registration": self.registration, "iterations": self.iterations, **left}

    def register(self, **arguments: Any) -> bool:
        orders: list[tuple[Computation, ...]] = arguments["schedule"]
        self.registration = {
            "orders": [[(int(c.kind), c.microbatch, c.chunk) for c in order] for order in orders],
            **{name: arguments[name] for name in ("paths", "stage_work", "stage_layers")},
        }
        return True

    def begin_iteration(self) -> None:
        self.iterations.append([])

    def end_iteration(self) -> None:
        assert self.open is None

    def begin_computation(self, kind: Kind, microbatch: int, chunk: int) -> None:
        assert self.open is None
        self.open = (int(kind), microbatch, chunk)
        self.iterations[-1].append(self.open)

    def end_computation(self, kind: Kind, microbatch: int, chunk: int) -> None:
        assert self.open == (int(kind), microbatch, chunk)
        self.open = None

    def begin_wait(self) -> None:
        assert self.open is not None

    end_wait = begin_wait

    def report_unmarked(self, message: str) -> None:
        raise AssertionError(message)

    def finish(self) -> None:
        self.is_finished = True

    def close(self) -> None:
        self.is_closed = True

    def connect(self, **_arguments: Any) -> "Notebook":
        """Replace `Probe.connect` for `attach`."""
        return self
