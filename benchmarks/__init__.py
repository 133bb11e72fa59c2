"""Measures torchcomms beside Gloo and Open MPI: what `tools/bench` runs."""
