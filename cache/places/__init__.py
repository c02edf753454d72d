"""Where decisions lie: a file, a folder of hosts' files, a server, each behind a guard."""
