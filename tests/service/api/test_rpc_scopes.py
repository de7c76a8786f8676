"""The table of scopes has every call of every service that is served, and no other."""

import importlib
from pathlib import Path

import pytest
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

import perseus.v1
from perseus.service.api.rpc_scopes import NOBODY, RPC_SCOPES, check_scope
from perseus.service.domain.errors import ScopeTooNarrowError
from perseus.service.domain.principals import Grant, Principal, Scope


def services() -> list[ServiceDescriptor]:
    stubs = sorted(Path(perseus.v1.__path__[0]).glob("*_service_pb2.py"))
    files = [importlib.import_module(f"perseus.v1.{path.stem}").DESCRIPTOR for path in stubs]
    files += [health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR]
    return [service for file in files for service in file.services_by_name.values()]


def test_every_call_has_its_scope() -> None:
    calls = {f"/{service.full_name}/{method.name}" for service in services() for method in service.methods}
    calls |= {call.replace("v1alpha", "v1") for call in calls}
    assert set(RPC_SCOPES) == calls


def test_only_health_needs_none() -> None:
    open_to_all = {rpc for rpc, scopes in RPC_SCOPES.items() if scopes == NOBODY}
    assert {rpc.split("/")[1] for rpc in open_to_all} == {"grpc.health.v1.Health"}


def test_an_operator_may_call_everything() -> None:
    operator = Principal("token op", Grant(Scope.OPERATOR))
    for rpc in RPC_SCOPES:
        check_scope(rpc, operator)


@pytest.mark.parametrize("rpc", ["/perseus.v1.JobService/DeleteJob", "/perseus.v1.JobService/Unheard"])
def test_a_call_beyond_the_scope_is_refused(rpc: str) -> None:
    reader = Principal("token dashboard", Grant(Scope.READER))
    with pytest.raises(ScopeTooNarrowError, match="found reader of token dashboard"):
        check_scope(rpc, reader)
