"""The MLflow record of a run: one writer, its log on disk, and what earlier runs left."""
