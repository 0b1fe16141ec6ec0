"""The parts of MLflow that this folder uses, imported without what they do not need.

As in mlflow-skinny, without pandas and SciPy, which take longer to import than everything else.
"""

from vit_ray.internals import hide_modules

with hide_modules("pandas", "scipy"):
    from mlflow.entities import (
        Dataset,
        DatasetInput,
        Experiment,
        InputTag,
        Metric,
        Param,
        Run,
        RunTag,
    )
    from mlflow.exceptions import MlflowException
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
    from mlflow.tracking import MlflowClient

__all__ = [
    "Dataset",
    "DatasetInput",
    "Experiment",
    "InputTag",
    "Metric",
    "MlflowClient",
    "MlflowException",
    "Param",
    "Run",
    "RunTag",
    "SystemMetricsMonitor",
]
