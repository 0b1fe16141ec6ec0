"""The parts of the net: module NAME has `record(folder)`, which gives what users have as JSON."""
