"""One module for each schema: the migration from the one before."""
