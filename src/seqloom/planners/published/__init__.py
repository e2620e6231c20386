"""Rivals: published planners, each implemented here from its description and answering with our ``Plan``.

So one cost model and one simulator price them all. They are for comparison only: ``auto`` does not ask them. What is
published and what is our reading of it stands at the head of every file.
"""
