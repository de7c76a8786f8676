"""A notebook in place of an agent, for a framework hook's marks and registration."""

from typing import Any

from perseus.agent.link.packets import Saving
from tests.agent.marks_stub import MarksStub, iteration_of

Identity = tuple[int, int, int]
"""(kind, microbatch, chunk) of a computation, as numbers on the wire."""


class Notebook(MarksStub):
    """Keeps marks and the registration (implements `Marks`), and knows of a saving."""

    saving = Saving(10.0, 0.0)

    def connect(self, **_arguments: Any) -> "Notebook":
        """Replace `Probe.connect` for `attach`."""
        return self

    def notes(self) -> dict[str, Any]:
        """Return all of it, for a file. `is_whole`: all that began has ended, one after another."""
        beside = ("register", "begin_wait", "end_wait", "finish", "close")
        marks = [call for call in self.calls if call[0] not in beside]
        iterations: list[list[Identity]] = []
        for name, *computation in marks:
            if name == "begin_iteration":
                iterations.append([])
            elif name == "begin":
                kind, microbatch, chunk = map(int, computation)
                iterations[-1].append((kind, microbatch, chunk))
        registration: dict[str, Any] = {}
        for arguments in self.registered:
            orders = [
                [(int(c.kind), c.microbatch, c.chunk) for c in order] for order in arguments["schedule"]
            ]
            more = {name: arguments[name] for name in ("paths", "stage_work", "stage_layers")}
            registration = {"orders": orders, **more}
        return {
            "registration": registration,
            "iterations": iterations,
            "is_whole": marks == [mark for each in iterations for mark in iteration_of(*each)],
            "ends": [call[0] for call in self.calls if call[0] in ("finish", "close")],
        }
