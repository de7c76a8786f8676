"""One module for each schema: how it comes from the one before."""
