"""A coordinator for each test that asks for one."""

from tests.service.grpc_fakes import client as client
from tests.service.sites import site as site
