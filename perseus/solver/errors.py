"""The solver's errors.

SolverError
├── ScheduleError   an order of computations is inconsistent or deadlocks
├── ProfileError    measurements are wrong, missing or unreadable
├── PipelineError   powers, lags or fixed times don't fit the schedule
├── DeadlineError   no plan is as fast as the asked iteration time
└── LagError        no lag between stages explains measured iteration times
"""


class SolverError(Exception):
    """Base of every error that the solver raises on bad input.

    ``details`` holds the variable values of the message by name, as text, for callers that report errors in a
    structured form.
    """

    def __init__(self, message: str, **details: object) -> None:
        super().__init__(message)
        self.details = {name: str(value) for name, value in details.items()}


class ScheduleError(SolverError):
    """An order of computations is inconsistent, or no execution can follow it."""


class ProfileError(SolverError):
    """A measurement is impossible, or a needed one is missing."""


class PipelineError(SolverError):
    """A blocking power, lag or fixed time is impossible or does not belong to the schedule."""


class DeadlineError(SolverError):
    """The requested iteration time is not a time, or shorter than T_min."""


class LagError(SolverError):
    """No lag between stages explains measured iteration times.

    `times_s` holds the times of the message by name, in seconds.
    """

    def __init__(self, message: str, **times_s: float) -> None:
        super().__init__(message, **times_s)
        self.times_s = times_s
