"""The whole fleet as every coordinator's page shows it: who serves which slot, and the jobs of other slots.

These jobs are read from the database, so they are shown even while their coordinators don't answer.
"""

from perseus.service.domain.members import Fleet, Member
from perseus.service.shell.jobs import Jobs
from perseus.service.web.json_text import as_json, large_to_json
from perseus.v1.job_service_pb2 import ListJobsResponse

_MAX_JOBS = 1_000
"""How many jobs of other slots are listed."""


async def overview(fleet: Fleet, jobs: Jobs) -> str:
    """Return all slots as JSON, each with who serves it, its page, and the jobs of all but the own one."""
    others = [slot.number for slot in fleet.slots if slot.number != fleet.served]
    listed = await jobs.of_slots(others, max(1, _MAX_JOBS // len(others))) if others else {}
    holders = fleet.holders()
    texts = []
    for slot in fleet.slots:
        holder = holders.get(slot.number)
        found, job_count = listed.get(slot.number, ([], 0))
        _, address, page_url = holder or Member("", "")
        facts = {
            "slot": slot.number,
            "is_served": holder is not None,
            "address": address,
            "page_url": page_url,
            "job_count": job_count,
        }
        texts.append(f'{as_json(facts)[:-1]},"listed":{await large_to_json(ListJobsResponse(jobs=found))}}}')
    return f'{{"slots":[{",".join(texts)}]}}'
