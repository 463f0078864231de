"""How long a step takes with each averager, on more GPUs than are at hand: a model, not a trial."""
