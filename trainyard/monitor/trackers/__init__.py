"""Programs that draw and keep a run's figures: Weights & Biases, TensorBoard, trackio."""
