"""The MLflow record of a run: one writer, its log on disk, and the runs of earlier attempts."""
