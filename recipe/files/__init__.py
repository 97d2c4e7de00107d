"""The files that a run begins with and leaves: models, tasks, a sweep's plan, the run's folder, checkpoints."""
