"""Where signals come from."""
