"""Commands that learn from data: collect, train, calibrate, tune, distill."""
