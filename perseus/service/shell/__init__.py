"""The asyncio shell: the coordinator around its jobs' machines and watchers."""
