"""What jumps, what has changed: noise that is learned, and evidence against it. Pure."""
