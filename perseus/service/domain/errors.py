"""The coordinator's errors and refusals.

An error's text is its class's template filled with `metadata`, the changing values by name. Long values are
cut, so that a client that sends a megabyte of nonsense gets one line back. Callers see the gRPC status code
and a reason, which is the class's name (docs/errors.md lists them all).
"""

import re
from collections.abc import Sequence
from typing import ClassVar

from perseus.job_id import JOB_ID_RULE

_MAX_VALUE_LENGTH = 256
"""Characters of a value that an error quotes."""


def cut(value: object, maximum: int = _MAX_VALUE_LENGTH) -> str:
    """Return a value as text, cut to a maximum of characters."""
    text = str(value)
    return text if len(text) <= maximum else f"{text[: maximum - 1]}…"


class ServiceError(Exception):
    """Base of all errors here: a template and the values that fill it."""

    template: ClassVar[str]

    def __init__(self, **metadata: object) -> None:
        self.metadata = {name: cut(value) for name, value in metadata.items()}
        super().__init__(self.template.format(**self.metadata))


class CoordinatorError(ServiceError):
    """A request, message or stream is refused.

    Attributes:
        code: the name of its gRPC status code.
        reason: its stable identifier for programs: JobNotFoundError has JOB_NOT_FOUND.
        retry_delay_s: after how long a retry may succeed; None if it will not.
    """

    code: ClassVar[str]
    reason: ClassVar[str]
    retry_delay_s: ClassVar[int | None] = None

    def __init_subclass__(cls) -> None:
        cls.reason = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__.removesuffix("Error")).upper()


class InvalidInputError(CoordinatorError):
    """An input violates the contract.

    Attributes:
        field: the field's path within its message.
        expected, found: the valid values, and the actual one.
    """

    code = "INVALID_ARGUMENT"
    parts: ClassVar[tuple[str, str, str]]
    """Templates of `field`, `expected` and `found`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.template = "{}: expected {}, found {}".format(*cls.parts)

    def __init__(self, **metadata: object) -> None:
        super().__init__(**metadata)
        self.field, self.expected, self.found = (part.format(**self.metadata) for part in self.parts)


class InvalidFieldError(InvalidInputError):
    """A value is missing, out of range or inconsistent."""

    parts = ("{field}", "{expected}", "{found}")


class InvalidJobIdError(InvalidInputError):
    """The job identifier is invalid."""

    parts = (
        "job_id",
        JOB_ID_RULE,
        "{job_id!r}",
    )


class RankOutOfRangeError(InvalidInputError):
    """The job's parallelism has no such rank."""

    parts = (
        "rank",
        "pipeline < {pipeline_count}, stage < {stage_count} and tensor < {tensor_count} in job {job_id!r}, "
        "none negative",
        "pipeline {pipeline}, stage {stage}, tensor {tensor}",
    )


class PipelineOutOfRangeError(InvalidInputError):
    """The job's parallelism has no such pipeline."""

    parts = ("pipeline", "0 to {last_pipeline} in job {job_id!r}", "{pipeline}")


class RankNotServedError(InvalidInputError):
    """Telemetry of a rank that the agent has not joined on this stream."""

    parts = (
        "rank",
        "a rank of job {job_id!r} that this agent has joined",
        "pipeline {pipeline}, stage {stage}, tensor {tensor}",
    )


class TelemetryOutdatedError(InvalidInputError):
    """Telemetry of an earlier trainer of the rank."""

    parts = ("sequence", "above {after_sequence}, the last of the rank's earlier trainer", "{sequence}")


class UnknownMessageError(InvalidInputError):
    """The coordinator does not know the message: its sender may use a newer protocol."""

    code = "UNIMPLEMENTED"
    parts = ("{field_numbers}", "a message of protocol version {protocol_version}", "field {field_numbers}")


class EmptyMessageError(InvalidInputError):
    """A message without content."""

    parts = ("message", "a message", "an empty one")


class MalformedMessageError(InvalidInputError):
    """The bytes are not a protocol buffer of the expected type."""

    parts = ("message", "a protocol buffer of the expected type", "{cause}")


class UnknownCallError(CoordinatorError):
    """The call does not exist, or is not served over HTTP."""

    code = "UNIMPLEMENTED"
    template = "{rpc} is not served over HTTP"


class ProtocolError(CoordinatorError):
    """A stream that does not follow the protocol."""

    code = "INVALID_ARGUMENT"


class HelloExpectedError(ProtocolError):
    """The first message on the stream is not hello."""

    template = "Connect: expected hello as the first message, found {found}"


class HelloRepeatedError(ProtocolError):
    """The agent sent hello twice."""

    template = "Connect: expected hello once, found it again from instance {instance_id!r}"


class JobNotFoundError(CoordinatorError):
    """The job does not exist.

    If a rank of it trains all the same, `unmarked` is why it marks no iterations.
    """

    code = "NOT_FOUND"
    template = "job {job_id!r} is not registered{unmarked}"

    def __init__(self, *, job_id: str, unmarked: str = "") -> None:
        super().__init__(job_id=job_id, unmarked=f": {unmarked}" if unmarked else "")
        if not unmarked:
            del self.metadata["unmarked"]


class JobUnreadableError(CoordinatorError):
    """The stored job can't be read. It can be deleted."""

    code = "DATA_LOSS"
    template = (
        "job {job_id!r}: can't read run {run_number} from the store; delete the job to continue: {cause}"
    )


class RunNotFoundError(CoordinatorError):
    """The job has no run of that number."""

    code = "NOT_FOUND"
    template = "job {job_id!r} has no run {run_number}"


class JobAlreadyExistsError(CoordinatorError):
    """A job with that identifier, another specification and live ranks exists."""

    code = "ALREADY_EXISTS"
    template = (
        "job {job_id!r} is registered with another specification, and has live ranks: its {field} differs"
    )


class JobFinishedError(CoordinatorError):
    """The job has ended."""

    code = "FAILED_PRECONDITION"
    template = "job {job_id!r} has finished"


class JobNotFinishedError(CoordinatorError):
    """The job has not ended yet."""

    code = "FAILED_PRECONDITION"
    template = "job {job_id!r} has not finished: it is {state}"


class JobQuarantinedError(CoordinatorError):
    """The job is quarantined at stock after a coordinator fault, until somebody resumes it."""

    code = "FAILED_PRECONDITION"
    template = "job {job_id!r} is quarantined, at stock: {cause}; ResumeJob restarts it from its stored state"


class JobNotSolvedError(CoordinatorError):
    """The job has no frontier yet."""

    code = "FAILED_PRECONDITION"
    retry_delay_s = 1
    template = "job {job_id!r} has no frontier yet: it is {state}"


class LayersUnknownError(CoordinatorError):
    """The number of layers of each stage is unknown."""

    code = "FAILED_PRECONDITION"
    template = (
        "job {job_id!r}: the numbers of its stages' layers are unknown: its specification has none, "
        "and neither has the request"
    )


class TimelineNotReadyError(CoordinatorError):
    """No complete iteration has been reported yet."""

    code = "FAILED_PRECONDITION"
    retry_delay_s = 1
    template = "job {job_id!r}: no complete iteration of pipeline {pipeline} has been reported yet"


class ServedError(CoordinatorError):
    """A rank or GPU is served already.

    Attributes:
        lease_left_s: how much of the lease of the agent that serves it is left.
    """

    code = "FAILED_PRECONDITION"
    retry_delay_s = 1

    def __init__(self, *, lease_left_s: float, **metadata: object) -> None:
        super().__init__(**metadata)
        self.lease_left_s = lease_left_s


class RankAlreadyServedError(ServedError):
    """Another agent serves the rank, or its lease still runs."""

    template = (
        "pipeline {pipeline}, stage {stage}, tensor {tensor} of job {job_id!r} is served by agent instance "
        "{instance_id!r} on {hostname!r}"
    )


class GpuAlreadyServedError(ServedError):
    """Another rank runs on the GPU, or its lease still runs."""

    template = (
        "GPU {gpu_uuid!r}: expected one rank per GPU, found pipeline {pipeline}, stage {stage}, "
        "tensor {tensor} of job {job_id!r} on it"
    )


class SpecMismatchError(CoordinatorError):
    """The rank belongs to a specification that the job's run was not registered with."""

    code = "FAILED_PRECONDITION"
    template = (
        "pipeline {pipeline}, stage {stage}, tensor {tensor}: expected a specification that run {run_number} "
        "of job {job_id!r} was registered with, found {spec_fingerprint!r}"
    )


class StreamReplacedError(CoordinatorError):
    """The agent opened a newer stream."""

    code = "ABORTED"
    template = "agent instance {instance_id!r} has opened another stream"


class StateLostError(CoordinatorError):
    """The coordinator has lost state that agents depend on; all agents must start over."""

    code = "UNAVAILABLE"
    retry_delay_s = 1
    template = "the coordinator has lost acknowledged state and begins epoch {epoch}"


class LeaseExpiredError(CoordinatorError):
    """The agent was silent for too long."""

    code = "UNAVAILABLE"
    retry_delay_s = 1
    template = "agent instance {instance_id!r} was silent for longer than its lease of {lease_s} s"


class ReaderTooSlowError(CoordinatorError):
    """The reader of a stream does not keep up."""

    code = "RESOURCE_EXHAUSTED"
    retry_delay_s = 1
    template = "more than {limit} unread bytes are queued"


class LimitReachedError(CoordinatorError):
    """The request would exceed a limit of its principal."""

    code = "RESOURCE_EXHAUSTED"
    retry_delay_s = 5
    template = "{principal}: expected at most {limit} {what}, found {found} including this one"


class SolverBusyError(CoordinatorError):
    """Too many problems wait for the solver."""

    code = "RESOURCE_EXHAUSTED"
    retry_delay_s = 1
    template = "{limit} problems are already waiting for the solver"


class SolverCrashedError(CoordinatorError):
    """The solver's process died."""

    code = "INTERNAL"
    retry_delay_s = 1
    template = "the solver's process died: {cause}"


class SolverTimeoutError(CoordinatorError):
    """Solving exceeded its time limit."""

    code = "DEADLINE_EXCEEDED"
    template = "the solver was stopped: it took longer than {limit_s} s"


class DrainingError(CoordinatorError):
    """The coordinator is about to stop."""

    code = "UNAVAILABLE"
    retry_delay_s = 1
    template = "the coordinator is about to stop"


class DatabaseUnreadableError(CoordinatorError):
    """A read of the coordinator's database has failed; the coordinator goes on."""

    code = "UNAVAILABLE"
    retry_delay_s = 1
    template = "the coordinator's database can't be read at the moment"


class ServedElsewhereError(CoordinatorError):
    """Another coordinator of the fleet serves the slot, at `address` and `page_url`; empty while none does.

    `standbys`, separated by commas, may take it over. One that stands by knows no slot from a unary call: it
    names any coordinator that serves one.
    """

    code = "UNAVAILABLE"
    retry_delay_s = 1
    template = "{sentence}"

    def __init__(
        self,
        *,
        address: str,
        slot: int | None = None,
        page_url: str = "",
        job_id: str = "",
        standbys: Sequence[str] = (),
    ) -> None:
        who = f"the coordinator at {address} serves" if address else "nobody serves"
        if job_id:
            sentence = f"job {job_id!r} is of slot {slot}, which {who}"
        else:
            sentence = f"{who} jobs" if slot is None else f"{who} slot {slot}"
        optional = {"page_url": page_url, "job_id": job_id, "standbys": ",".join(standbys)}
        given: dict[str, object] = {name: value for name, value in optional.items() if value}
        if slot is not None:
            given["slot"] = slot
        super().__init__(address=address, sentence=sentence, **given)
        del self.metadata["sentence"]


class BudgetNotFoundError(CoordinatorError):
    """The power budget does not exist."""

    code = "NOT_FOUND"
    template = "there is no power budget {budget_id!r}"


class FeedNotFoundError(CoordinatorError):
    """The feed does not exist."""

    code = "NOT_FOUND"
    template = "there is no feed {feed!r}: expected one of {expected}"


class TokenNotFoundError(CoordinatorError):
    """No token has that name."""

    code = "NOT_FOUND"
    template = "there is no token {name!r}"


class TokenAlreadyExistsError(CoordinatorError):
    """A token of that name exists, possibly revoked or expired."""

    code = "ALREADY_EXISTS"
    template = "token {name!r} already exists"


class AuthenticationError(CoordinatorError):
    """The caller is not authenticated."""

    code = "UNAUTHENTICATED"


class CredentialMissingError(AuthenticationError):
    """The call has neither a token nor a client certificate with a grant."""

    template = "expected a token as metadata `authorization: Bearer …`, found none"


class TokenUnknownError(AuthenticationError):
    """The coordinator does not know the token."""

    template = "the coordinator does not know the token"


class TokenExpiredError(AuthenticationError):
    """The token has expired."""

    template = "token {name!r} has expired"


class TokenRevokedError(AuthenticationError):
    """The token was revoked."""

    template = "token {name!r} is revoked"


class ForbiddenError(CoordinatorError):
    """The caller is authenticated but not authorized."""

    code = "PERMISSION_DENIED"


class ScopeTooNarrowError(ForbiddenError):
    """The call needs a scope that the caller does not have."""

    template = "{rpc}: expected scope {expected}, found {found} of {principal}"


class HostOutOfScopeError(ForbiddenError):
    """The caller may not run on that host."""

    template = "{principal} may not run on host {hostname!r}"


class JobOutOfScopeError(ForbiddenError):
    """The caller may not speak for that job."""

    template = "{principal} may not speak for job {job_id!r}"


class BudgetOwnerMismatchError(ForbiddenError):
    """The power budget belongs to another principal."""

    template = (
        "power budget {budget_id!r} exists and belongs to {owner}, so {principal} may not replace or cancel "
        "it: use another identifier, or ask an operator"
    )


class OwnerMismatchError(ForbiddenError):
    """The job belongs to another owner."""

    template = "job {job_id!r} does not belong to owner {owner!r}"


class OriginMismatchError(ForbiddenError):
    """An HTTP request comes from another site's page, or without an origin."""

    template = "expected the header Origin to be {expected}, found {found}"


class HostUnknownError(ForbiddenError):
    """An HTTP request uses a host name that is not the coordinator's, as in DNS rebinding."""

    template = "expected localhost, an address or a name in http_hosts as the header Host, found {found}"


class InstanceServedError(ForbiddenError):
    """The agent instance belongs to another credential, and nothing proves that it is the same agent."""

    template = "agent instance {instance_id!r} belongs to a credential other than {principal}"


class InternalError(CoordinatorError):
    """The coordinator itself failed; its log has the traceback."""

    code = "INTERNAL"
    template = "the coordinator failed: {cause}"


class StartupError(ServiceError):
    """The coordinator cannot start."""


class AddressUnavailableError(StartupError):
    """The address can't be bound."""

    template = "cannot listen on {address}: is another coordinator running there? ({cause})"


class CertificatesUnusableError(StartupError):
    """A certificate, its key or a CA can't be used; the cause names the file."""

    template = "{cause}"


class TokenFileUnusableError(StartupError):
    """The operator's token can't be read or written; the cause names its file."""

    template = "{cause}"


class SignalUnusableError(StartupError):
    """A signal's source is configured wrongly; the cause says how."""

    template = "signals.{signal}: {cause}"


class DaskMissingError(StartupError):
    """A Dask cluster is configured, and its client is not installed."""

    template = "dask: expected the package distributed (perseus-energy[dask]), found none"


class DatabaseUnavailableError(StartupError):
    """The database cannot be opened."""

    template = "cannot open the database {database}: {cause}"


class RecordingUnreadableError(ServiceError):
    """A recorded run has another version, or the file is not a recorded run."""

    template = "cannot read the recorded run: expected {expected}, found {found}"


class StoreFailedError(ServiceError):
    """The database fails while the coordinator runs, which can then acknowledge nothing more."""

    template = "the database {database} failed: {cause}"


class LeaseLostError(StoreFailedError):
    """This coordinator could not renew its lease in time, or another one has taken over its jobs."""

    template = "this coordinator's lease is lost: {cause}"
