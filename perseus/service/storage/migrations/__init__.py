"""The migrations from each schema to the next; run by `migrating`."""
