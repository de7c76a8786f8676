"""The main job on one machine: coordinator, agents and an emulated trainer as real processes on loopback."""
