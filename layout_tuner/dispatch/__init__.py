"""Which candidate a call runs, and what became of calls."""
