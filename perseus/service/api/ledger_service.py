"""`perseus.v1.LedgerService`: a thin adapter over the ledger."""

# ruff: noqa: N802 (the contract names the methods)

import base64
import binascii
import re
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from perseus.service.api.authentication import caller
from perseus.service.api.paging import Page, no_token
from perseus.service.api.statuses import mapped
from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.messages import time_from_proto, time_to_proto
from perseus.service.domain.specification import check_job_id
from perseus.service.domain.statement import J_PER_KWH, Account, LedgerEntry
from perseus.service.shell.ledger import Ledger
from perseus.service.shell.quotas import Quotas
from perseus.v1 import ledger_service_pb2 as pb
from perseus.v1 import ledger_service_pb2_grpc

_PLACE = re.compile(
    r"(?P<job_id>[^ ]+) (?P<deletion>[0-9]{1,18}) (?P<run>[0-9]{1,18}) (?P<total>[A-Za-z0-9+/=]*)", re.ASCII
)

Context = grpc.aio.ServicerContext[Any, Any]


class LedgerService(ledger_service_pb2_grpc.LedgerServiceServicer):
    """Lists what runs have used and saved."""

    def __init__(self, ledger: Ledger, quotas: Quotas) -> None:
        self._ledger = ledger
        self._quotas = quotas

    @mapped
    async def ListLedgerEntries(
        self, request: pb.ListLedgerEntriesRequest, context: Context
    ) -> pb.ListLedgerEntriesResponse:
        """Return a page of ledger entries, and the total.

        The total takes a pass over the whole ledger: it is made for the first page, and stays in the tokens.
        """
        page = Page.asked(request)
        if request.job_id:
            check_job_id(request.job_id)
        start_time_s, end_time_s = (
            time_from_proto(field, getattr(request, field)) if request.HasField(field) else None
            for field in ("start_time", "end_time")
        )
        after, total = _at(page.after) if page.after else (None, None)
        with self._quotas.listing(caller().name):
            found = await self._ledger.statement(
                start_time_s, end_time_s, request.job_id, after, page.size + 1
            )
        if total is None:
            total = account_to_proto(found.total)
        known = base64.b64encode(total.SerializeToString()).decode()
        entries, token = page.fill(
            (f"{entry.job_id} {entry.deletion} {entry.run_number} {known}", entry_to_proto(entry))
            for entry in found.entries
        )
        return pb.ListLedgerEntriesResponse(entries=entries, total=total, next_page_token=token)


def _at(place: str) -> tuple[tuple[str, int, int], pb.LedgerAccount]:
    """Return the run at a place in a page token, and the total.

    Raises:
        InvalidFieldError: the token is invalid.
    """
    found = _PLACE.fullmatch(place)
    if found is None:
        raise no_token(place)
    try:
        check_job_id(found["job_id"])
        total = pb.LedgerAccount.FromString(base64.b64decode(found["total"], validate=True))
    except (InvalidFieldError, binascii.Error, DecodeError):
        raise no_token(place) from None
    return (found["job_id"], int(found["deletion"]), int(found["run"])), total


def entry_to_proto(entry: LedgerEntry) -> pb.LedgerEntry:
    """Return a run's entry in the ledger."""
    return pb.LedgerEntry(
        job_id=entry.job_id,
        run_number=entry.run_number,
        is_deleted=entry.deletion > 0,
        start_time=time_to_proto(entry.start_time_s),
        end_time=time_to_proto(entry.end_time_s),
        account=account_to_proto(entry.account),
    )


def account_to_proto(account: Account) -> pb.LedgerAccount:
    """Return an account in kWh."""
    sums, energy_j = account.sums, account.energy_j
    return pb.LedgerAccount(
        iteration_count=sums.iteration_count,
        unmeasured_iteration_count=sums.unmeasured_count,
        time_s=sums.time_s,
        energy_kwh=sums.energy_j / J_PER_KWH,
        cost=account.cost.used,
        carbon_g=account.carbon_g.used,
        stock_energy_kwh=sums.stock_energy_j / J_PER_KWH,
        uncompared_energy_kwh=sums.uncompared_energy_j / J_PER_KWH,
        saved_energy_kwh=_kwh(energy_j.saved),
        saved_energy_se_kwh=_kwh(energy_j.saved_se),
        saved_energy_margin_kwh=_kwh(energy_j.saved_margin),
        saved_percent=account.saved_percent,
        saved_se_percent=account.saved_se_percent,
        saved_cost=account.cost.saved,
        saved_cost_se=account.cost.saved_se,
        saved_carbon_g=account.carbon_g.saved,
        saved_carbon_se_g=account.carbon_g.saved_se,
        saved_margin_percent=account.saved_margin_percent,
        saved_cost_margin=account.cost.saved_margin,
        saved_carbon_margin_g=account.carbon_g.saved_margin,
        profiling_energy_kwh=sums.profiling_energy_j / J_PER_KWH,
        profiling_extra_energy_kwh=_kwh(account.profiling_extra_j),
        straggler_energy_kwh=sums.straggler_energy_j / J_PER_KWH,
        price_per_kwh=account.rates.price_per_kwh,
        intensity_g_per_kwh=account.rates.intensity_g_per_kwh,
    )


def _kwh(energy_j: float | None) -> float | None:
    return None if energy_j is None else energy_j / J_PER_KWH
