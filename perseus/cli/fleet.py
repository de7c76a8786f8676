"""Questions to all coordinators of a fleet: each serves some of the jobs, so lists come from all of them."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar

from perseus.cli.escaping_channel import EscapingChannel
from perseus.cli.listing import TIMEOUT_S, pages
from perseus.cli.terminal import FAILURE, fail
from perseus.job_id import MAX_SLOT_COUNT

if TYPE_CHECKING:
    import grpc

    from perseus.v1.info_service_pb2 import ListCoordinatorsResponse
    from perseus.v1.job_pb2 import Job
    from perseus.v1.job_service_pb2 import ListJobsRequest, ListJobsResponse

T = TypeVar("T")


class Fleet:
    """The coordinators that serve jobs, found by way of one of them; a context manager.

    Attributes:
        channel: to that one, or for what is about one job to the one that serves it.
        missing: who did not answer the latest question, and which slots nobody serves, for people.
    """

    def __init__(self, channel: EscapingChannel) -> None:
        self.channel = channel.as_grpc
        self.missing: list[str] = []
        self._entry = channel
        self._others: dict[str, EscapingChannel] = {}
        self._open_channels = ExitStack()

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *error: object) -> None:
        self._open_channels.close()

    def ask(self, question: "Callable[[grpc.Channel], T]") -> dict[int, T]:
        """Return the answers of all coordinators that serve jobs, at least one, by slot.

        Raises grpc.RpcError if none answers, or one refuses.
        """
        import grpc

        silence: grpc.RpcError | None = None
        answers: dict[int, T] = {}
        for slot, channel in self._serving().items():
            address = channel.address
            try:
                answers[slot] = question(channel.as_grpc)
            except grpc.RpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise
                silence = error
                self.missing.append(f"slot {slot} at {address} does not answer")
        if silence is not None and not answers:
            raise silence
        return answers

    def jobs(self, request: "ListJobsRequest") -> "list[Job]":
        """Return the jobs of all coordinators, by identifier. Raises as `ask`."""
        from perseus.v1.job_service_pb2_grpc import JobServiceStub

        answers = self.ask(lambda channel: list(pages(JobServiceStub(channel).ListJobs, request)))
        return merged_jobs(answers.values())

    def keeper(self) -> "grpc.Channel":
        """Return a channel to slot 0's coordinator: it keeps tokens and budgets, and knows feeds whole."""
        serving = self._serving()
        if 0 not in serving:
            fail(f"tokens, budgets and feeds are kept with slot 0: {'; '.join(self.missing)}", FAILURE)
        if len(serving) + len(self.missing) == 1:
            return serving[0].as_grpc
        # What takes over for the one that was found may be of another slot, which knows a part of the feeds.
        return (self._to(serving[0].address) or serving[0]).as_grpc

    def _serving(self) -> dict[int, EscapingChannel]:
        """Return a channel to each coordinator that serves a slot of jobs; note which are missing."""
        answering, listed = self._listed()
        self.missing = []
        if listed is None or not listed.slot_count:  # an older one, which serves all jobs
            return {0: answering}
        by_slot = {each.slot: each for each in listed.coordinators if each.HasField("slot")}
        serving = {}
        for slot in range(min(listed.slot_count, MAX_SLOT_COUNT)):
            found = by_slot.get(slot)
            if found is None:
                self.missing.append(f"nobody serves slot {slot} of {listed.slot_count}")
            elif found.is_answering:
                serving[slot] = answering
            elif (channel := self._to(found.address)) is not None:
                serving[slot] = channel
            else:
                self.missing.append(f"slot {slot} is served at {found.address!r}, which may not be followed")
        return serving

    def _listed(self) -> "tuple[EscapingChannel, ListCoordinatorsResponse | None]":
        """Return the first coordinator that answers, and the fleet as that one knows it, if it does."""
        import grpc

        from perseus.v1.info_service_pb2 import ListCoordinatorsRequest
        from perseus.v1.info_service_pb2_grpc import InfoServiceStub

        silence: grpc.RpcError | None = None
        for channel in (self._entry, *self._others.values()):
            try:
                stub = InfoServiceStub(channel.as_grpc)
                return channel, stub.ListCoordinators(ListCoordinatorsRequest(), timeout=TIMEOUT_S)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    return channel, None
                silence = silence or error
        assert silence is not None
        self._entry.move_on(silence)  # for the next time
        raise silence

    def _to(self, address: str) -> EscapingChannel | None:
        if address not in self._others:
            channel = self._entry.to(address)
            if channel is None:
                return None
            self._others[address] = self._open_channels.enter_context(channel)
        return self._others[address]


def merged_jobs(answers: "Iterable[Iterable[ListJobsResponse]]") -> "list[Job]":
    """Return the jobs on the pages of all coordinators, by identifier."""
    jobs = (job for answer in answers for page in answer for job in page.jobs)
    return sorted(jobs, key=lambda job: job.job_id)
