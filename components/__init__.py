"""Plain functions of the loop: collect, train, calibrate, tune, judge. They know neither Prefect
nor MLflow."""
