"""Everything that one GPU, or a simulated one, can show about the backend; tools/gpu_check."""
