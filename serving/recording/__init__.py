"""Recording: what the models of a request say while it is decoded, as the rows of a trace."""
