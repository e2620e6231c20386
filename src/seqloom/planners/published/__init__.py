"""Rivals: published planners, each implemented here from its description and answering with our ``Plan``.

So one cost model and one simulator price them all. They are for comparison only: ``auto`` does not ask them (except
FlexSP's solver on tiny batches). Every docstring says which part is published and which is our reading of it.
"""
