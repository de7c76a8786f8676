"""How each schema becomes the next; run by `migrating`."""
