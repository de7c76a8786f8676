"""Agent process, pure: power from an energy counter that updates only every 20–100 ms."""
