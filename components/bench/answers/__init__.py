"""Whether answers are right: numbers, choices, unit tests in a sandbox, ROUGE-L against
references."""
