"""Which sample stands at which position of a run, and who reads it."""
