"""The asyncio shell: the coordinator around its jobs' machines, watchers, solving in worker processes."""
