"""`perseus doctor`: looks for what is wrong with a set-up, and says what to do. Changes nothing."""
