"""What ails the machines that a recipe is to be trained on, and what to do about it."""
