"""Plain values that all packages of the service share. Pure; imports only the solver's values."""
