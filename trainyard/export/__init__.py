"""Exports of a trained model for other programs, checked against the model itself."""

OPSET = 18
"""Of ONNX files: the oldest that torch writes; onnxruntime reads it since 1.14, of early 2023."""
IMAGES, TOLERANCE = 500, 1.0
"""Validation images that measure an export; points of accuracy that it may lose on them."""
