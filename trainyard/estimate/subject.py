"""The training to estimate, from a recipe, with a model that takes no memory."""

from trainyard.config import RunConfig
from trainyard.estimate.account import Subject
from trainyard.estimate.forecast import job_of
from trainyard.estimate.memory import sizes_of
from trainyard.estimate.work import build_work


def subject_of(config: RunConfig, *, samples: int, val_samples: int, num_classes: int) -> Subject:
    """RecipeError if there is no such model, or if it cannot be trained as the recipe says."""
    import torch

    from trainyard.model.flops import forward_flops
    from trainyard.run.build import build_run_course, build_run_model
    from trainyard.training.precision import AUTOCASTS

    with torch.device("meta"):
        model = build_run_model(config, num_classes)
    size = config.data.image_size
    return Subject(
        config=config,
        course=build_run_course(config, samples),
        work=build_work(model.train(), size, AUTOCASTS[config.batch.precision]),
        sizes=sizes_of(model, config),
        job=job_of(model),
        flops=3.0 * forward_flops(model, size),
        val_samples=val_samples,
    )
