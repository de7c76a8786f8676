"""From profiles to clocks: the frontier, the offers, and the checks that predictions hold. Pure."""
