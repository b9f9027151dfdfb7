"""A bench as tables and plots."""
