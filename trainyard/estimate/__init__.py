"""Cost of a run on GPUs that are not at hand, by a model instead of a trial."""
