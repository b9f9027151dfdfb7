"""What every report is made of: confidence intervals, tables, drawings, and the machine and code that figures depend on."""
