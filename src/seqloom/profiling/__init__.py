"""Measuring a machine (`kernels`, `calibration`), predicting a run (`check`) and comparing results (`verify`)."""
