"""Experiment trackers: Weights & Biases, TensorBoard, trackio, MLflow."""
