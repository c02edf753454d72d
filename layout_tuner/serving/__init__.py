"""Entry points of serving engines: each serves its engine's prefill where the settings ask for it."""
