"""From profiles to clocks: the frontier, the offers, and whether plans keep their promise. Pure."""
