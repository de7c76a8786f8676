"""Agent process: the asyncio shell, the local socket, the GPUs and their threads, settings, self-test."""
