"""From a candidate and a call to a prepared launch, and a quick test whether a later call has it."""
