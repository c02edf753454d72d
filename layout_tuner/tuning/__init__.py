"""The miss path: candidates on synthetic inputs, checked against the oracle, timed, decided."""
