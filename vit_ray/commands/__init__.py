"""What a person types: one module per command, which the files of `jobs/` call."""
