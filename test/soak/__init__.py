"""Endurance: random operations, random groups, random faults, every result checked."""
