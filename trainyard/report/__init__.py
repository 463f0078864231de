"""HTML reports: one or several runs as one file that needs no network."""
