"""Vision Transformers at scale on Ray: stream, train, sweep, study and report."""

__version__ = "0.1.0"
