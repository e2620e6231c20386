"""What several tests share: oracles, worker pools, simulated hosts, small models and plans."""
