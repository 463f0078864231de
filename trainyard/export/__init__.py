"""Exports of a trained model for other programs, checked against the model itself."""
