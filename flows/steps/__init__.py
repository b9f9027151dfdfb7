"""The steps of the loop as plain functions: collect, train, calibrate, tune, publish, gate, deploy,
monitor. None knows Prefect."""
