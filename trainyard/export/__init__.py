"""A trained model for other programs, checked to say the same there before it is put in place."""
