"""Agent process, pure: a rank's session. Takes events and the time, returns commands."""
