"""Experiment trackers: Weights & Biases, TensorBoard, MLflow."""
