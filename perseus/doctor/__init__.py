"""`perseus doctor`: find what is wrong with a set-up, and say how to fix it. Changes nothing."""
