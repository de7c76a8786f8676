"""What the coordinator refuses, and why.

Each error's text is its class's template filled with `metadata`: the changing values by name, cut where they
are long: whoever sends a megabyte of nonsense gets a line back. Callers see its gRPC status code and its
reason, which is the class's name (docs/errors.md has them all).
"""

import re
from typing import ClassVar

_MAX_VALUE_LENGTH = 256
"""Characters of a value that an error quotes."""


def cut(value: object, maximum: int = _MAX_VALUE_LENGTH) -> str:
    """Return a value as text of at most so many characters."""
    text = str(value)
    return text if len(text) <= maximum else f"{text[: maximum - 1]}…"


class ServiceError(Exception):
    """Base of all errors here: a template, and the values that it is filled with."""

    template: ClassVar[str]

    def __init__(self, **metadata: object) -> None:
        self.metadata = {name: cut(value) for name, value in metadata.items()}
        super().__init__(self.template.format(**self.metadata))


class CoordinatorError(ServiceError):
    """A request, message or stream is refused.

    Attributes:
        code: the name of its gRPC status code.
        reason: what programs know it by: JobNotFoundError is JOB_NOT_FOUND.
        retry_delay_s: when the same request may be answered otherwise; None if it will not be.
    """

    code: ClassVar[str]
    reason: ClassVar[str]
    retry_delay_s: ClassVar[int | None] = None

    def __init_subclass__(cls) -> None:
        cls.reason = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__.removesuffix("Error")).upper()


class InvalidInputError(CoordinatorError):
    """What arrived is not what the contract says.

    Attributes:
        field: where, by its path from the message that it is in.
        expected, found: what should be there, and what is.
    """

    code = "INVALID_ARGUMENT"
    parts: ClassVar[tuple[str, str, str]]
    """Templates of the three."""

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
    """Not an identifier."""

    parts = (
        "job_id",
        "1 to 63 of a–z, 0–9, '-', '_' and '.', beginning with a letter or digit",
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

    parts = ("sequence", "above {after_sequence}, where the rank's trainer begins", "{sequence}")


class UnknownMessageError(InvalidInputError):
    """A message that is not known here: the sender speaks a newer protocol, say."""

    code = "UNIMPLEMENTED"
    parts = ("{field_numbers}", "a message of protocol version {protocol_version}", "field {field_numbers}")


class EmptyMessageError(InvalidInputError):
    """A message without content."""

    parts = ("message", "a message", "an empty one")


class MalformedMessageError(InvalidInputError):
    """No protocol buffer of its kind."""

    parts = ("message", "a protocol buffer of its kind", "{cause}")


class UnknownCallError(CoordinatorError):
    """A call that is not served over HTTP, or that there is not."""

    code = "UNIMPLEMENTED"
    template = "{rpc} is not served over HTTP"


class ProtocolError(CoordinatorError):
    """A stream that does not follow the protocol."""

    code = "INVALID_ARGUMENT"


class HelloExpectedError(ProtocolError):
    """Something else came first."""

    template = "Connect: expected hello as the first message, found {found}"


class HelloRepeatedError(ProtocolError):
    """Hello came twice."""

    template = "Connect: expected hello once, found it again from instance {instance_id!r}"


class JobNotFoundError(CoordinatorError):
    """There is no such job."""

    code = "NOT_FOUND"
    template = "job {job_id!r} is not registered"


class JobUnreadableError(CoordinatorError):
    """What is stored of the job can't be read. It can be deleted."""

    code = "DATA_LOSS"
    template = (
        "job {job_id!r}: run {run_number} can't be read from the store, delete the job to go on: {cause}"
    )


class RunNotFoundError(CoordinatorError):
    """The job has no run of that number."""

    code = "NOT_FOUND"
    template = "job {job_id!r} has no run {run_number}"


class JobAlreadyExistsError(CoordinatorError):
    """Another specification has that identifier, and live ranks."""

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
    """A fault of the coordinator's own has put the job aside, at stock, until somebody resumes it."""

    code = "FAILED_PRECONDITION"
    template = "job {job_id!r} is quarantined, at stock: {cause}; ResumeJob begins anew from what is stored"


class JobNotSolvedError(CoordinatorError):
    """There is no frontier yet."""

    code = "FAILED_PRECONDITION"
    retry_delay_s = 1
    template = "job {job_id!r} has no frontier yet: it is {state}"


class TimelineNotReadyError(CoordinatorError):
    """No whole iteration has been seen yet."""

    code = "FAILED_PRECONDITION"
    retry_delay_s = 1
    template = "job {job_id!r}: no whole iteration of pipeline {pipeline} has been seen yet"


class RankAlreadyServedError(CoordinatorError):
    """Another agent serves the rank, or its lease still runs."""

    code = "FAILED_PRECONDITION"
    retry_delay_s = 1
    template = (
        "pipeline {pipeline}, stage {stage}, tensor {tensor} of job {job_id!r} is served by agent instance "
        "{instance_id!r} on {hostname!r}"
    )


class GpuAlreadyServedError(CoordinatorError):
    """Another rank is on the GPU, or its lease still runs."""

    code = "FAILED_PRECONDITION"
    retry_delay_s = 1
    template = (
        "GPU {gpu_uuid!r} is that of pipeline {pipeline}, stage {stage}, tensor {tensor} of job {job_id!r}: "
        "a GPU runs one rank"
    )


class SpecMismatchError(CoordinatorError):
    """The rank belongs to another specification than the job's run."""

    code = "FAILED_PRECONDITION"
    template = (
        "pipeline {pipeline}, stage {stage}, tensor {tensor} belongs to specification {spec_fingerprint!r}, "
        "with which run {run_number} of job {job_id!r} was not registered"
    )


class StreamReplacedError(CoordinatorError):
    """The agent opened a newer stream."""

    code = "ABORTED"
    template = "agent instance {instance_id!r} has opened another stream"


class StateLostError(CoordinatorError):
    """The coordinator's state is older than what an agent knows of it: everybody is to begin anew."""

    code = "UNAVAILABLE"
    retry_delay_s = 1
    template = "the coordinator has lost state that it had acknowledged, and begins epoch {epoch}"


class LeaseExpiredError(CoordinatorError):
    """The agent was silent for too long."""

    code = "UNAVAILABLE"
    retry_delay_s = 1
    template = "agent instance {instance_id!r} was silent for longer than its lease of {lease_s} s"


class ReaderTooSlowError(CoordinatorError):
    """A stream's reader does not keep up."""

    code = "RESOURCE_EXHAUSTED"
    retry_delay_s = 1
    template = "more than {limit} bytes wait to be read"


class LimitReachedError(CoordinatorError):
    """Who calls would have more at once than one principal may."""

    code = "RESOURCE_EXHAUSTED"
    retry_delay_s = 5
    template = "{principal}: expected at most {limit} {what}, found {found} with this one"


class SolverBusyError(CoordinatorError):
    """Too many problems wait to be solved."""

    code = "RESOURCE_EXHAUSTED"
    retry_delay_s = 1
    template = "{limit} problems wait to be solved already"


class SolverCrashedError(CoordinatorError):
    """The solver's process died."""

    code = "INTERNAL"
    retry_delay_s = 1
    template = "the solver's process died: {cause}"


class SolverTimeoutError(CoordinatorError):
    """Solving took longer than it may."""

    code = "DEADLINE_EXCEEDED"
    template = "the solver was stopped: it took longer than {limit_s} s"


class DrainingError(CoordinatorError):
    """The coordinator is about to stop."""

    code = "UNAVAILABLE"
    retry_delay_s = 1
    template = "the coordinator is about to stop"


class BudgetNotFoundError(CoordinatorError):
    """There is no such power budget."""

    code = "NOT_FOUND"
    template = "there is no power budget {budget_id!r}"


class FeedNotFoundError(CoordinatorError):
    """There is no such feed."""

    code = "NOT_FOUND"
    template = "there is no feed {feed!r}: expected one of {expected}"


class TokenNotFoundError(CoordinatorError):
    """There is no token of that name."""

    code = "NOT_FOUND"
    template = "there is no token {name!r}"


class TokenAlreadyExistsError(CoordinatorError):
    """There is a token of that name, be it revoked or expired."""

    code = "ALREADY_EXISTS"
    template = "there is a token {name!r} already"


class AuthenticationError(CoordinatorError):
    """Nobody knows who calls."""

    code = "UNAUTHENTICATED"


class CredentialMissingError(AuthenticationError):
    """No token, and no certificate whose identity stands for one."""

    template = "expected a token as metadata `authorization: Bearer …`, found none"


class TokenUnknownError(AuthenticationError):
    """The token is none of this coordinator's."""

    template = "the token is none of this coordinator's"


class TokenExpiredError(AuthenticationError):
    """The token's time is over."""

    template = "token {name!r} has expired"


class TokenRevokedError(AuthenticationError):
    """The token was revoked."""

    template = "token {name!r} is revoked"


class ForbiddenError(CoordinatorError):
    """Who calls is known, and may not do that."""

    code = "PERMISSION_DENIED"


class ScopeTooNarrowError(ForbiddenError):
    """The call needs another scope than the caller has."""

    template = "{rpc}: expected scope {expected}, found {found} of {principal}"


class HostOutOfScopeError(ForbiddenError):
    """The caller may not run on that host."""

    template = "{principal} may not run on host {hostname!r}"


class JobOutOfScopeError(ForbiddenError):
    """The caller may not speak for that job."""

    template = "{principal} may not speak for job {job_id!r}"


class OwnerMismatchError(ForbiddenError):
    """The job is another owner's."""

    template = "job {job_id!r} is another owner's than {owner!r}"


class OriginMismatchError(ForbiddenError):
    """Another site's page asks over HTTP, or nobody says whose it is."""

    template = "expected the header Origin to be {expected}, found {found}"


class HostUnknownError(ForbiddenError):
    """The coordinator is asked over HTTP by a name that is none of its own: another site may have lent it."""

    template = "expected localhost, an address or a name in http_hosts as the header Host, found {found}"


class InstanceServedError(ForbiddenError):
    """The agent's instance is another credential's, and nothing shows that it is the same agent."""

    template = "agent instance {instance_id!r} has come with another credential than {principal}"


class InternalError(CoordinatorError):
    """A fault of the coordinator's own; its log has the traceback."""

    code = "INTERNAL"
    template = "the coordinator failed: {cause}"


class StartupError(ServiceError):
    """The coordinator can not start."""


class AddressUnavailableError(StartupError):
    """Nothing can be bound at the address."""

    template = "can not listen on {address}: is another coordinator running there? ({cause})"


class CertificatesUnusableError(StartupError):
    """A certificate, its key or a CA can't be used; the cause names the file."""

    template = "{cause}"


class TokenFileUnusableError(StartupError):
    """The operator's token can't be read or written; the cause names its file."""

    template = "{cause}"


class SignalUnusableError(StartupError):
    """A signal can't be read as it is set; the cause says why."""

    template = "signals.{signal}: {cause}"


class DatabaseUnavailableError(StartupError):
    """The database can not be opened."""

    template = "can not open the database {database}: {cause}"


class RecordingUnreadableError(ServiceError):
    """A recorded run is of another version, or none at all."""

    template = "can not read the recorded run: expected {expected}, found {found}"


class StoreFailedError(ServiceError):
    """The database fails while the coordinator runs: nothing can be promised any more."""

    template = "the database {database} failed: {cause}"
