"""Launches: a candidate is prepared for a call, and a quick test says which later calls may use what was prepared."""
