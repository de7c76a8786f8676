"""The claims to GPUs and jobs on this node, and which of two claims yields.

A claim belongs to a trainer, from its hello to its end. A GPU has one claim, and so has a rank; all ranks of
a job belong to one user. First come, first served would allow squatting, so between two users proof decides
(`Allowed.is_proven`: a grant, or a process that runs on the GPU), and the coordinator's answer:

    the newcomer wants   and the holder, another user, has   then
    -------------------- ----------------------------------- -----------------------
    its GPU, granted     no grant                            the holder yields
    its GPU, proven      no proof                            the holder yields
    its job, proven      no proof, and was never accepted    the holder yields
    its job, proven      been refused by the coordinator     the holder yields
    either, otherwise    anything                            the newcomer is refused

A user never evicts themselves: a rank or GPU stays taken until its trainer is gone.
"""

from dataclasses import dataclass

from perseus.agent.claims.decision import Allowed, Refused
from perseus.agent.claims.grants import User
from perseus.agent.link.computation import Rank

RANK_TAKEN = "RANK_ALREADY_SERVED"
GPU_TAKEN = "GPU_ALREADY_IN_USE"
JOB_TAKEN = "JOB_OF_ANOTHER_USER"


@dataclass(eq=False, slots=True)
class Claim:
    """One trainer's claim. `verdict` is None for an unusable GPU: it then holds only the rank and job."""

    rank: Rank
    gpu_uuid: str
    user: User
    verdict: Allowed | None
    was_accepted: bool = False
    was_refused: bool = False

    @property
    def is_proven(self) -> bool:
        """Whether a grant or a running process supports it."""
        return self.verdict is not None and self.verdict.is_proven

    @property
    def _is_granted(self) -> bool:
        return self.verdict is not None and self.verdict.is_granted

    def yields_to(self, newcomer: "Claim") -> bool:
        """Whether it ends in favour of a conflicting claim of another user."""
        if self.gpu_uuid == newcomer.gpu_uuid and self.verdict is not None and newcomer.verdict is not None:
            yields_gpu = (newcomer._is_granted and not self._is_granted) or (
                newcomer.is_proven and not self.is_proven
            )
            if not yields_gpu:
                return False
        if self.rank.job_id == newcomer.rank.job_id:
            has_nothing = not self.is_proven and not self.was_accepted
            return newcomer.is_proven and (has_nothing or self.was_refused)
        return True


class ClaimRegistry:
    """The claims of a node."""

    def __init__(self) -> None:
        self._claims: dict[Rank, Claim] = {}

    def claims(self) -> list[Claim]:
        """Return all claims."""
        return list(self._claims.values())

    def get(self, rank: Rank) -> Claim | None:
        """Return the claim to a rank, if any."""
        return self._claims.get(rank)

    def conflicts(self, newcomer: Claim) -> list[Claim] | Refused:
        """Return the claims that must end before `newcomer` can be entered, or why it can't be."""
        conflicting = [claim for claim in self._claims.values() if _conflict(claim, newcomer)]
        for claim in conflicting:
            if claim.user.uid == newcomer.user.uid or not claim.yields_to(newcomer):
                return _refusal(claim, newcomer)
        return conflicting

    def refusal(self, rank: Rank, gpu_uuid: str, user: User) -> Refused | None:
        """Return why a newcomer can't be entered even with the best proof; None if it may be.

        Conflicts over another user's GPU are not judged here: the later verdict explains a refusal better.
        """
        newcomer = Claim(rank, gpu_uuid, user, Allowed(is_granted=True, is_running=True))
        for claim in self._claims.values():
            is_own = claim.user.uid == user.uid
            is_about_gpu = not is_own and claim.gpu_uuid == gpu_uuid
            if not is_about_gpu and _conflict(claim, newcomer) and (is_own or not claim.yields_to(newcomer)):
                return _refusal(claim, newcomer)
        return None

    def has_other_for_gpu(self, claim: Claim) -> bool:
        """Whether another claim has the GPU of a claim whose GPU was unusable so far."""
        return any(
            other is not claim and other.verdict is not None and other.gpu_uuid == claim.gpu_uuid
            for other in self._claims.values()
        )

    def enter(self, claim: Claim) -> None:
        """Enter a claim that conflicts with no other."""
        assert self.conflicts(claim) == []
        self._claims[claim.rank] = claim

    def end(self, claim: Claim) -> None:
        """Remove the claim of a trainer that is gone or was evicted."""
        if self._claims.get(claim.rank) is claim:
            del self._claims[claim.rank]

    def answered(self, rank: Rank, *, is_accepted: bool) -> None:
        """Note the coordinator's answer to a rank."""
        if (claim := self._claims.get(rank)) is not None:
            claim.was_accepted |= is_accepted
            claim.was_refused = not is_accepted

    def has_job(self, job_id: str) -> bool:
        """Whether any trainer of the job is connected."""
        return any(rank.job_id == job_id for rank in self._claims)


def _conflict(claim: Claim, newcomer: Claim) -> bool:
    if claim.rank == newcomer.rank:
        return True
    if claim.rank.job_id == newcomer.rank.job_id and claim.user.uid != newcomer.user.uid:
        return True
    have_gpus = claim.verdict is not None and newcomer.verdict is not None
    return have_gpus and claim.gpu_uuid == newcomer.gpu_uuid


def _refusal(claim: Claim, newcomer: Claim) -> Refused:
    if claim.user.uid == newcomer.user.uid and claim.rank == newcomer.rank:
        return Refused(RANK_TAKEN, f"{newcomer.rank}: another trainer is connected as this rank")
    have_gpus = claim.verdict is not None and newcomer.verdict is not None
    if have_gpus and claim.gpu_uuid == newcomer.gpu_uuid:
        return Refused(GPU_TAKEN, f"GPU {newcomer.gpu_uuid}: another rank runs on it")
    job = newcomer.rank.job_id
    return Refused(JOB_TAKEN, f"job {job!r}: expected a job of user {newcomer.user}, found another user's")
