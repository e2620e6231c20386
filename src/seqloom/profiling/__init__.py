"""Measuring a machine (`kernels`, `calibration`), predicting a run (`check`), comparing steps (`verify`, `replay`)."""
