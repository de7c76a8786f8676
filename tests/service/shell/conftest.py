"""A coordinator for each test that asks for one."""

from tests.service.grpc_fakes import client as client
