"""A run, or several, as one HTML file that opens without a network."""
