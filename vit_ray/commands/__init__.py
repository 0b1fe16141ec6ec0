"""The commands: one module each, called by the files of `jobs/`."""
