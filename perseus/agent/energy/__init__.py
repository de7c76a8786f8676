"""Agent process, pure: watts from an energy counter that moves only every 20–100 ms."""
