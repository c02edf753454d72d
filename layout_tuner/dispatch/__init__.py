"""Which candidate a call runs, and counts of the calls that ran."""
