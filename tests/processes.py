"""What tests need of processes beyond `perseus.demo.processes`: fleets, agents' pids, last words."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from perseus.demo.processes import Coordinator, Process, end, entries, until
from tests.ports import free_port

MEMBER_LEASE_S = 8.0
"""Shorter ones are lost on a busy machine, where a coordinator may wait for a second."""

_LAST_LINES = 20


class Fleet:
    """Coordinators on one database: one for each slot, and one that stands by. Leaving the context ends them.

    `databases`: the database's URL, for each coordinator. `environment`: with their credentials, if any.
    """

    def __init__(
        self,
        folder: Path,
        databases: Sequence[str],
        *flags: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.slots = range(len(databases) - 1)
        flags = (f"--slots={len(self.slots)}", f"--member-lease-s={MEMBER_LEASE_S}", *flags)
        self._folder = folder
        self.coordinators = []
        for number, database in enumerate(databases):
            (own := folder / f"coordinator-{number}").mkdir()
            address = f"127.0.0.1:{free_port()}"
            made = Coordinator(own, database, *flags, environment=environment, address=address)
            self.coordinators.append(made)

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *_: object) -> None:
        end(*self.coordinators)

    @property
    def addresses(self) -> str:
        """All addresses, that of the last one first: it stands by after the first start."""
        return ",".join(each.address for each in reversed(self.coordinators))

    def start(self) -> None:
        """Start those that don't run, the last one last; wait until each is up, and all slots are served."""
        for group in (self.coordinators[:-1], self.coordinators[-1:]):
            for each in group:
                if not each.is_running:
                    each.launch()
            for each in group:
                each.until(partial(_is_up, each), f"{each.address} listening, or standing by")
        for slot in self.slots:
            self.holder(slot)

    def holder(self, slot: int, but: Coordinator | None = None) -> Coordinator:
        """Wait until one that runs serves a slot, other than `but`; return it."""
        until(
            lambda: any(_serves(each, slot) for each in self.coordinators if each is not but),
            f"a coordinator that serves slot {slot}",
            state=lambda: tails(self._folder),
        )
        return next(each for each in self.coordinators if each is not but and _serves(each, slot))


def _is_up(coordinator: Coordinator) -> bool:
    return any(map(coordinator.count, ("listening", "standing by")))


def _serves(coordinator: Coordinator, slot: int) -> bool:
    logged = entries(coordinator.log) if coordinator.is_running else []
    taken = [entry["slot"] for entry in logged if entry["event"] == "took over the jobs"]
    return taken == [slot] and any(entry["event"] == "listening" for entry in logged)


def agent_pid(supervisor: Process) -> int:
    """Wait for the agent itself, its supervisor's only child."""
    children = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children")
    supervisor.until(lambda: bool(children.read_text()), "the agent's process")
    return int(children.read_text().split()[0])


def tails(folder: Path) -> str:
    """Return the ends of all logs, after a failed wait: nobody will find the folder."""
    logs = [
        f"--- {path.relative_to(folder)}\n"
        + "\n".join(path.read_text(errors="replace").splitlines()[-_LAST_LINES:])
        for path in sorted(folder.rglob("*.log"))
    ]
    return "\n".join(logs)


def is_gone(pid: int) -> bool:
    """Whether a process has ended; its parent may not have waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
