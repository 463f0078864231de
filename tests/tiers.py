"""The tests that `make test` leaves to `make test-all`, by contract.

An entry is a folder, a file, a test, or the beginning of a parametrised test's name. Each kind of
process that tests start has a smoke test in the quick tier: SMOKES are exceptions from SLOW.
"""

SLOW = {
    "Slurm, Ray, MPI, ssh, Kubernetes, nginx and object stores, driven for real": (
        "tests/services",
        "tests/launch/test_kubernetes.py::test_a_pod_that_was_moved_goes_on",
        "tests/launch/test_local.py",
        "tests/launch/test_mpi.py::test_under_nohup",
        "tests/launch/test_slurm_text.py::test_course",
        "tests/launch/test_slurm_text.py::test_text",
        "tests/launch/test_kubernetes.py::test_failures_are_counted",
        "tests/launch/test_torchrun.py",
        "tests/commands/test_voices.py::test_every_rank_says_its_lines",
        "tests/test_early_stop.py::test_while_torch_waits",
        "tests/doctor/test_alone.py",
        "tests/doctor/test_ranks.py",
    ),
    "ranks that are lost, hang, start late or differ": (
        "tests/distributed",
        "tests/test_cli_signals.py",
    ),
    "kills, bit flips and damaged images at random": (
        "tests/fuzz",
        "tests/trials",
        "tests/data/test_pack_restart.py",
        "tests/data/test_stage.py",
        "tests/test_phases.py::test_a_run_that_was_cut_off",
        "tests/training/test_resume.py::test_a_run_goes_on_beside",
        "tests/training/test_saving.py::test_a_run_that_saves_by_the_time",
        "tests/training/test_saving.py::test_all_ranks_save_after",
        "tests/training/test_resume.py::test_killed_at_random_steps",
        "tests/training/test_resume.py::test_stopped_by_a_signal",
        "tests/data/test_imagenet.py::test_killed",
        "tests/data/test_imagenet.py::test_other_settings_do_not_go_on_with_a_killed_run",
    ),
    "averagers and their runs on several ranks": (
        "tests/averaging/test_contract.py",
        "tests/averaging/test_decent_dp.py",
        "tests/averaging/test_gossip.py",
        "tests/averaging/test_hooks.py",
        "tests/averaging/test_nodes.py",
        "tests/averaging/test_periodic.py",
        "tests/averaging/test_quantize.py",
        "tests/averaging/test_runs.py",
        "tests/averaging/test_sharded.py",
        "tests/training/test_sharded_resume.py",
        "tests/training/test_equivalence.py",
        "tests/test_join.py::test_another_number_of_ranks",
        "tests/test_join.py::test_an_error_on_one_rank",
        "tests/test_join.py::test_four_ranks",
        "tests/test_join.py::test_it_goes_back",
        "tests/test_join.py::test_ranks_that_see_other_shards",
        "tests/test_join.py::test_shadows",
        "tests/test_join.py::test_two_ranks",
    ),
    "one part of a run on several ranks": (
        "tests/monitor/test_quarantine.py::test_ranks_tell_each_other",
        "tests/test_bad_images.py::test_two_ranks",
        "tests/test_cli_evaluate.py::test_two_ranks",
        "tests/test_initial.py::test_every_rank_begins_with_them",
        "tests/test_library.py::test_two_ranks_train_as_one",
        "tests/test_phases.py::test_ranks_see_the_plan",
        "tests/training/test_bn_statistics.py::test_statistics_are_those_of_all_values",
        "tests/training/test_evaluate.py::test_equal_to_a_plain_evaluation",
        "tests/training/test_headroom.py",
        "tests/training/test_micro.py::test_a_run_with_little_memory",
        "tests/training/test_micro.py::test_memory_that_ends_in_the_middle",
        "tests/training/test_micro.py::test_ranks_run_out_of_memory",
        "tests/training/test_resume.py::test_a_loader_that_dies_on_one_rank",
        "tests/training/test_resume.py::test_killed_as_a_command",
        "tests/training/test_resume.py::test_two_ranks_go_on_as_another_number",
        "tests/training/test_stop.py::test_all_ranks_stop",
    ),
    "runs that go back after gradients that are not finite": ("tests/training/test_guard.py",),
    "torch.compile": (
        "tests/doctor/test_compiled.py::test_a_compiled_family",
        "tests/optim/test_optimizers.py::test_a_compiled_update",
        "tests/training/test_compile.py",
    ),
    "every recipe and every container, trained from end to end": (
        "tests/test_data_end_to_end.py",
        "tests/test_credentials.py::test_data_sets_that_are_written",
        "tests/test_recipes.py::test_two_steps_of_it_in_small",
        "tests/training/test_no_sync.py::test_a_step_and_its_batch_wait_for_nothing",
        "tests/training/test_resume.py::test_killed_with_data_in_any_order",
        "tests/training/test_resume.py::test_micro_batches_of_augmented_batches",
        "tests/training/test_distill.py",
        "tests/test_evaluation.py",
        "tests/test_classifier.py",
        "tests/export",
        "tests/test_cli_predict.py",
        "tests/test_cli_export.py",
        "tests/test_rectangles.py",
        "tests/model/test_flops.py",
        "tests/model/test_weights.py::test_a_model_that_timm_never_trained",
        "tests/estimate",
        "tests/test_cli_estimate.py",
        "tests/data/native/test_quality.py",
    ),
    "builds, packages and what imports what, each in a process of its own": (
        "tests/benchmarks",
        "tests/data/native/test_build.py",
        "tests/test_makefile.py",
    ),
    "reports and pages in a browser, the documentation, notebooks, trackers": (
        "tests/docs/test_code_blocks.py",
        "tests/docs/test_site.py",
        "tests/monitor/trackers",
        "tests/report",
        "tests/test_docs_predict_export.py",
        "tests/test_notebook_a_run.py",
    ),
}

SMOKES = (
    "tests/averaging/test_gossip.py::test_complete_without_overlap_is_all_reduce",
    "tests/averaging/test_periodic.py::test_plain_sgd_averaged_in_every_step_is_all_reduce",
    "tests/averaging/test_sharded.py::test_the_same_steps_as_all_reduce[micro-batches, clipped]",
    "tests/data/test_stage.py::test_a_run_with_staging_is_the_run_without",
    "tests/report/test_page.py",
    "tests/test_cli_predict.py::test_what_a_person_sees",
    "tests/test_cli_signals.py::test_launch_stops_after_a_checkpoint[10-75]",
    "tests/test_evaluation.py::test_raw_and_averaged_weights_are_those_that_training_evaluated",
    "tests/test_recipes.py::test_two_steps_of_it_in_small[digits]",
    "tests/training/test_equivalence.py::test_same_losses_as_one_process[4-plain]",
    "tests/training/test_guard.py::test_skipped_updates_are_counted",
    "tests/training/test_guard.py::test_the_guard",
    "tests/training/test_no_sync.py::test_a_step_and_its_batch_wait_for_nothing[fp16]",
    "tests/training/test_no_sync.py::test_a_step_and_its_batch_wait_for_nothing[resnet50-a1]",
    "tests/training/test_resume.py::test_killed_at_random_steps[batch norm]",
    "tests/training/test_resume.py::test_stopped_by_a_signal[in an epoch]",
)


def is_slow(test: str) -> bool:
    """Whether a test, by its node's name, is left to `make test-all`."""
    return any(map(test.startswith, _ALL)) and not any(map(test.startswith, SMOKES))


_ALL = tuple(entry for entries in SLOW.values() for entry in entries)
