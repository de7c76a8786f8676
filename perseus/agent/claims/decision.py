"""May this user have this GPU's clocks set? Decides from the operator's grants and the kernel's facts.

The agent is root's deputy: it does for a trainer what the trainer could not do itself, so it must not be
tricked into doing it to another user's GPU. Rules, in this order:

    1  A grant of the user's covers the GPU                          yes
    2  Grants name the GPU, or the user, and no grant of theirs
       covers it; or a grant file is malformed                       no
    3  The kernel does not let the user open the GPU's device
       (their cgroup counts), or that is unknown                     no
    4  A process of another user runs on it                          no
       … this is unknown, and the user is not the agent's own        no
    5  otherwise                                                     yes, on present evidence

Device nodes are usually open to all, and CUDA opens every one: an open device proves nothing, and the facts
may change. So the agent judges the claim again, at the first mark and periodically: before CUDA is
initialised no process is visible. Once a process of the user was seen alone on the GPU, the claim stands:
later processes do not end it (rule 4 is not applied again), but the operator's grants may (1 and 2).
"""

from dataclasses import dataclass
from enum import Enum

from perseus.agent.claims.grants import Grants, Labels, User


class Access(Enum):
    """Whether the kernel lets a user open a GPU's device."""

    OPEN = "open"
    CLOSED = "closed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class GpuObservation:
    """Facts about a GPU from the kernel and the driver, for one user.

    `access_problem` is the reason why an access is CLOSED or UNKNOWN. `owners` are the users of the processes
    that compute on the GPU, None if the driver does not report them.
    """

    access: Access
    access_problem: str = ""
    owners: frozenset[int] | None = frozenset()
    is_agents_user: bool = False


@dataclass(frozen=True, slots=True)
class Allowed:
    """The claim is valid, by a grant or by observation.

    `is_running`: a process of the user runs on the GPU. `labels` are those of the grant.
    """

    is_granted: bool = False
    is_running: bool = False
    labels: Labels = ()

    @property
    def is_proven(self) -> bool:
        """Whether a grant or a running process supports it, not only the absence of objections."""
        return self.is_granted or self.is_running


@dataclass(frozen=True, slots=True)
class Refused:
    """The claim is not valid: a stable reason for programs, a sentence for people."""

    reason: str
    message: str


NOT_GRANTED = "GPU_NOT_GRANTED"
GRANTS_NOT_UNDERSTOOD = "GRANTS_NOT_UNDERSTOOD"
NOT_OPENABLE = "GPU_NOT_OPENABLE"
OF_ANOTHER_USER = "GPU_OF_ANOTHER_USER"
NOT_KNOWN = "GPU_USE_NOT_KNOWN"

_GRANT_IT = "a grant can permit it (docs/security.md)"


def by_grant(grants: Grants, user: User, uuid: str, index: int) -> Allowed | Refused | None:
    """Judge a claim by the grants; None if none applies. `is_running` is unknown here."""
    of_user = [grant for grant in grants.grants if grant.is_for(user)]
    covering = [grant for grant in of_user if grant.covers(uuid, index)]
    if covering:
        labels = dict(label for grant in covering for label in grant.labels)
        return Allowed(is_granted=True, labels=tuple(sorted(labels.items())))
    if of_user or any(grant.names(uuid, index) for grant in grants.grants):
        return Refused(NOT_GRANTED, f"GPU {uuid}: expected a grant for user {user}, found grants without it")
    if grants.problems:
        return Refused(
            GRANTS_NOT_UNDERSTOOD,
            f"GPU {uuid}: user {user} has no grant, which is required while a grant file is malformed: "
            f"{grants.problems[0]}",
        )
    return None


def by_observation(user: User, uuid: str, observation: GpuObservation, *, stands: bool) -> Allowed | Refused:
    """Judge a claim by observation. `stands`: a process of the user was seen alone on the GPU before."""
    is_running = observation.owners is not None and user.uid in observation.owners
    if stands:
        return Allowed(is_running=True)
    if observation.access is not Access.OPEN:
        found = "may not" if observation.access is Access.CLOSED else "perhaps may not"
        return Refused(
            NOT_OPENABLE,
            f"GPU {uuid}: expected that user {user} may open its device, found that they {found}: "
            f"{observation.access_problem}; {_GRANT_IT}",
        )
    if observation.owners is None:
        if observation.is_agents_user:
            return Allowed()
        return Refused(
            NOT_KNOWN, f"GPU {uuid}: the driver does not report whose processes run on it; {_GRANT_IT}"
        )
    others = sorted(observation.owners - {user.uid})
    if others:
        return Refused(
            OF_ANOTHER_USER,
            f"GPU {uuid}: expected no process of another user than {user} on it, "
            f"found user {', '.join(map(str, others[:3]))}'s",
        )
    return Allowed(is_running=is_running)
