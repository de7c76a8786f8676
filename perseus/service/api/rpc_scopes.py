"""The scopes that each call of each service needs: one table for the whole server."""

from collections.abc import Collection, Mapping

from perseus.service.domain.errors import ScopeTooNarrowError
from perseus.service.domain.principals import Principal, Scope

NOBODY: frozenset[Scope] = frozenset()
"""For a call that needs no scope: everybody may make it."""

_OPERATORS = frozenset({Scope.OPERATOR})
READERS = frozenset({Scope.READER, Scope.OPERATOR})
"""For a call that changes nothing."""

_GRID = frozenset({Scope.GRID, Scope.OPERATOR})
_GRID_READERS = READERS | _GRID

# Calls about a job also check the job: an agent may act only for the jobs that its grant names.
_AGENTS = frozenset({Scope.AGENT, Scope.OPERATOR})

RPC_SCOPES: Mapping[str, frozenset[Scope]] = {
    "/grpc.health.v1.Health/Check": NOBODY,
    "/grpc.health.v1.Health/Watch": NOBODY,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": READERS,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": READERS,
    "/perseus.v1.AgentService/Connect": _AGENTS,
    "/perseus.v1.FrontierService/GetFrontier": READERS,
    "/perseus.v1.FrontierService/GetPlan": READERS,
    "/perseus.v1.FrontierService/GetRebalancing": READERS,
    "/perseus.v1.FrontierService/Solve": _OPERATORS,
    "/perseus.v1.InfoService/GetInfo": frozenset(Scope),
    "/perseus.v1.InfoService/ListCoordinators": frozenset(Scope),
    "/perseus.v1.JobService/ClearStraggler": _OPERATORS,
    "/perseus.v1.JobService/DeleteJob": _OPERATORS,
    "/perseus.v1.JobService/FinishJob": _OPERATORS,
    "/perseus.v1.JobService/GetJob": READERS,
    "/perseus.v1.JobService/GetReport": READERS,
    "/perseus.v1.JobService/GetTimeline": READERS,
    "/perseus.v1.JobService/ListJobEvents": READERS,
    "/perseus.v1.JobService/ListJobs": READERS,
    "/perseus.v1.JobService/ListRanks": _GRID_READERS,
    "/perseus.v1.JobService/ListRuns": READERS,
    "/perseus.v1.JobService/MeasureBaseline": _OPERATORS,
    "/perseus.v1.JobService/RegisterJob": _AGENTS,
    "/perseus.v1.JobService/ReportStraggler": _OPERATORS,
    "/perseus.v1.JobService/ResumeJob": _OPERATORS,
    "/perseus.v1.JobService/SetPolicy": _OPERATORS,
    "/perseus.v1.JobService/WatchJob": READERS,
    "/perseus.v1.LedgerService/ListLedgerEntries": READERS,
    "/perseus.v1.PowerService/CancelBudget": _GRID,
    "/perseus.v1.PowerService/ListBudgets": _GRID_READERS,
    "/perseus.v1.PowerService/ListFeeds": _GRID_READERS,
    "/perseus.v1.PowerService/SetBudget": _GRID,
    "/perseus.v1.PowerService/WatchFeeds": _GRID_READERS,
    "/perseus.v1.TokenService/CreateToken": _OPERATORS,
    "/perseus.v1.TokenService/ListTokens": _OPERATORS,
    "/perseus.v1.TokenService/RevokeToken": _OPERATORS,
}
"""By the full name of the call; one of the scopes is enough. Nobody may make a call that is not listed."""


def check_scope(rpc: str, principal: Principal) -> None:
    """Check that a principal may make a call.

    Raises:
        ScopeTooNarrowError: it may not.
    """
    wanted = RPC_SCOPES.get(rpc)
    if wanted != NOBODY:
        check_one_of(wanted or NOBODY, rpc, principal)


def check_one_of(wanted: Collection[Scope], what: str, principal: Principal) -> None:
    """Check that a principal has one of some scopes; `what` names the call or request in the error.

    Raises:
        ScopeTooNarrowError: it has none of them.
    """
    if principal.grant.scope not in wanted:
        raise ScopeTooNarrowError(
            rpc=what,
            expected=" or ".join(sorted(scope.value for scope in wanted)) or "no scope at all",
            found=principal.grant.scope.value,
            principal=principal.name,
        )
