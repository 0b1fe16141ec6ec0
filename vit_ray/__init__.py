"""Vision Transformers at scale on Ray: stream, train, sweep, study and report."""

import os

# Must be said before mlflow is imported anywhere: training tells nobody but its own tracking server.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

__version__ = "0.1.0"
