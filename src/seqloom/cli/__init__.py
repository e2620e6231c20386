"""The command line: one short file per verb, heavy imports inside the verbs."""
