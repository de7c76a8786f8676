"""May this user have this GPU's clocks set? Decided from what the operator granted and what the kernel shows.

The agent is root's deputy: it does for a trainer what the trainer could not do itself, so it must not be
talked into doing it to somebody else's GPU. Asked in this order:

    1  A grant of the user's covers the GPU                          yes
    2  Grants name the GPU, or the user, and no grant of theirs
       covers it; or a grant file is not understood                  no
    3  The kernel does not let the user open the GPU's device
       (their cgroup counts), or nobody can tell                     no
    4  A process of another user runs on it                          no
       … that is not known, and the user is not the agent's own      no
    5  otherwise                                                     yes, as far as can be seen

Device nodes are usually open to all, and CUDA opens every one: that a process holds one open proves nothing,
and what is seen may change. So the question is asked again, at the first mark and from then on: before CUDA
is initialised no process can be seen. Once a process of the user's was seen alone on the GPU the claim
stands: whoever comes later does not take it away (4 is not asked again), but the operator's grants do (1 and
2).
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
    """What the kernel and the driver show of a GPU, for one user.

    `access_problem` says why an access is CLOSED or UNKNOWN. `owners` are the users of the processes that
    compute on the GPU, None if the driver does not tell.
    """

    access: Access
    access_problem: str = ""
    owners: frozenset[int] | None = frozenset()
    is_agents_user: bool = False


@dataclass(frozen=True, slots=True)
class Allowed:
    """The claim is good: by a grant, or by sight. `is_running`: a process of the user's runs on the GPU.

    `labels` are those of the grant.
    """

    is_granted: bool = False
    is_running: bool = False
    labels: Labels = ()

    @property
    def is_proven(self) -> bool:
        """Whether there is more to it than that nothing spoke against it."""
        return self.is_granted or self.is_running


@dataclass(frozen=True, slots=True)
class Refused:
    """The claim is not good: a stable reason for programs, a sentence for people."""

    reason: str
    message: str


NOT_GRANTED = "GPU_NOT_GRANTED"
GRANTS_NOT_UNDERSTOOD = "GRANTS_NOT_UNDERSTOOD"
NOT_OPENABLE = "GPU_NOT_OPENABLE"
OF_ANOTHER_USER = "GPU_OF_ANOTHER_USER"
NOT_KNOWN = "GPU_USE_NOT_KNOWN"

_GRANT_IT = "a grant says who may (docs/security.md)"


def by_grant(grants: Grants, user: User, uuid: str, index: int) -> Allowed | Refused | None:
    """What the operator says of it; None if nothing. `is_running` is not known here."""
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
            f"GPU {uuid}: user {user} has no grant, and as long as grants are not understood nobody may do "
            f"without: {grants.problems[0]}",
        )
    return None


def by_observation(user: User, uuid: str, observation: GpuObservation, *, stands: bool) -> Allowed | Refused:
    """What the kernel and the driver show of it. `stands`: the claim was seen to be good before."""
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
            NOT_KNOWN, f"GPU {uuid}: the driver does not tell whose processes run on it; {_GRANT_IT}"
        )
    others = sorted(observation.owners - {user.uid})
    if others:
        return Refused(
            OF_ANOTHER_USER,
            f"GPU {uuid}: expected no process of another user than {user} on it, "
            f"found user {', '.join(map(str, others[:3]))}'s",
        )
    return Allowed(is_running=is_running)
