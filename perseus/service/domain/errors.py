"""What the coordinator refuses, and why.

    CoordinatorError
    ├── InvalidInputError           what arrived is not what the contract says
    │   ├── InvalidFieldError       a value is missing, out of range or inconsistent
    │   ├── InvalidJobIdError       not an identifier
    │   ├── RankOutOfRangeError     the job's parallelism has no such rank
    │   └── PipelineOutOfRangeError the job's parallelism has no such pipeline
    ├── ProtocolError               a stream that does not follow the protocol
    │   ├── HelloExpectedError      something else came first
    │   ├── HelloRepeatedError      it came twice
    │   └── EmptyMessageError       a message without content
    ├── JobNotFoundError
    ├── RunNotFoundError            the job has no run of that number
    ├── JobAlreadyExistsError       another specification has that identifier, and live ranks
    ├── JobFinishedError            the job has ended
    ├── JobNotFinishedError         the job has not ended yet
    ├── JobNotSolvedError           there is no frontier yet
    ├── TimelineNotReadyError       no whole iteration has been seen yet
    ├── RankAlreadyServedError      another agent serves the rank, or its lease still runs
    ├── SpecMismatchError           the rank belongs to another specification than the job's run
    ├── StreamReplacedError         the agent opened a newer stream
    ├── LeaseExpiredError           the agent was silent for too long
    ├── ReaderTooSlowError          a stream's reader does not keep up
    ├── SolverBusyError             too many problems wait to be solved
    ├── SolverCrashedError          the solver's process died
    └── DrainingError               the coordinator is about to stop
    StartupError                    the coordinator can not start; never seen over gRPC
    ├── AddressUnavailableError
    └── DatabaseUnavailableError

Each error's text is its class's template filled with `metadata`: the changing values by name. `statuses.py`
maps every class to its gRPC status.
"""

from typing import ClassVar


class ServiceError(Exception):
    """Base of all errors here: a template, and the values that it is filled with."""

    template: ClassVar[str]

    def __init__(self, **metadata: object) -> None:
        super().__init__(self.template.format(**metadata))
        self.metadata = {name: str(value) for name, value in metadata.items()}


class CoordinatorError(ServiceError):
    """A request, message or stream is refused."""


class InvalidInputError(CoordinatorError):
    """What arrived is not what the contract says."""


class InvalidFieldError(InvalidInputError):
    """A value is missing, out of range or inconsistent."""

    template = "{field}: expected {expected}, found {found}"


class InvalidJobIdError(InvalidInputError):
    """Not an identifier."""

    template = (
        "job_id: expected 1 to 63 of a–z, 0–9, '-', '_' and '.', beginning with a letter or digit, "
        "found {job_id!r}"
    )


class RankOutOfRangeError(InvalidInputError):
    """The job's parallelism has no such rank."""

    template = (
        "rank: expected pipeline < {pipeline_count}, stage < {stage_count} and tensor < {tensor_count} "
        "in job {job_id!r}, none negative, found pipeline {pipeline}, stage {stage}, tensor {tensor}"
    )


class PipelineOutOfRangeError(InvalidInputError):
    """The job's parallelism has no such pipeline."""

    template = "pipeline: expected 0 to {last_pipeline} in job {job_id!r}, found {pipeline}"


class ProtocolError(CoordinatorError):
    """A stream that does not follow the protocol."""


class HelloExpectedError(ProtocolError):
    """Something else came first."""

    template = "Connect: expected hello as the first message, found {found}"


class HelloRepeatedError(ProtocolError):
    """Hello came twice."""

    template = "Connect: expected hello once, found it again from instance {instance_id!r}"


class EmptyMessageError(ProtocolError):
    """A message without content."""

    template = "Connect: expected a message, found an empty one"


class JobNotFoundError(CoordinatorError):
    """There is no such job."""

    template = "job {job_id!r} is not registered"


class RunNotFoundError(CoordinatorError):
    """The job has no run of that number."""

    template = "job {job_id!r} has no run {run_number}"


class JobAlreadyExistsError(CoordinatorError):
    """Another specification has that identifier, and live ranks."""

    template = (
        "job {job_id!r} is registered with another specification, and has live ranks: its {field} differs"
    )


class JobFinishedError(CoordinatorError):
    """The job has ended."""

    template = "job {job_id!r} has finished"


class JobNotFinishedError(CoordinatorError):
    """The job has not ended yet."""

    template = "job {job_id!r} has not finished: it is {state}"


class JobNotSolvedError(CoordinatorError):
    """There is no frontier yet."""

    template = "job {job_id!r} has no frontier yet: it is {state}"


class TimelineNotReadyError(CoordinatorError):
    """No whole iteration has been seen yet."""

    template = "job {job_id!r}: no whole iteration of pipeline {pipeline} has been seen yet"


class RankAlreadyServedError(CoordinatorError):
    """Another agent serves the rank, or its lease still runs."""

    template = (
        "pipeline {pipeline}, stage {stage}, tensor {tensor} of job {job_id!r} is served by agent instance "
        "{instance_id!r} on {hostname!r}"
    )


class SpecMismatchError(CoordinatorError):
    """The rank belongs to another specification than the job's run."""

    template = (
        "pipeline {pipeline}, stage {stage}, tensor {tensor} belongs to specification {spec_fingerprint!r}, "
        "with which run {run_number} of job {job_id!r} was not registered"
    )


class StreamReplacedError(CoordinatorError):
    """The agent opened a newer stream."""

    template = "agent instance {instance_id!r} has opened another stream"


class LeaseExpiredError(CoordinatorError):
    """The agent was silent for too long."""

    template = "agent instance {instance_id!r} was silent for longer than its lease of {lease_s} s"


class ReaderTooSlowError(CoordinatorError):
    """A stream's reader does not keep up."""

    template = "more than {limit} messages wait to be read"


class SolverBusyError(CoordinatorError):
    """Too many problems wait to be solved."""

    template = "{limit} problems wait to be solved already"


class SolverCrashedError(CoordinatorError):
    """The solver's process died."""

    template = "the solver's process died: {cause}"


class DrainingError(CoordinatorError):
    """The coordinator is about to stop."""

    template = "the coordinator is about to stop"


class StartupError(ServiceError):
    """The coordinator can not start."""


class AddressUnavailableError(StartupError):
    """Nothing can be bound at the address."""

    template = "can not listen on {address}: is another coordinator running there? ({cause})"


class DatabaseUnavailableError(StartupError):
    """The database can not be opened."""

    template = "can not open the database {path}: {cause}"
