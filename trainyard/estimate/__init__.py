"""What a run would take, on GPUs that are not at hand: a model, not a trial."""
