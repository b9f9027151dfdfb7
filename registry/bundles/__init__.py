"""Building a bundle from a release: `make deploy`."""
