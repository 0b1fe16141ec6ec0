"""Vision Transformers at scale on Ray: stream, train, sweep, study and report."""

import os

# Said before mlflow is imported anywhere: nobody but one's own server is told of a training.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

__version__ = "0.1.0"
