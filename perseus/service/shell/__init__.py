"""The asyncio layer of the coordinator, around the jobs' state machines and the watchers."""
