"""Where an arm leaves the baseline, and why. Watches the loops of `decode`; they never know."""
