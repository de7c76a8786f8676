"""Agent process, pure: a rank's session. Events and the time in, commands out."""
