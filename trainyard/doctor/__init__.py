"""Checks of the machines that a recipe is to be trained on, with advice."""
