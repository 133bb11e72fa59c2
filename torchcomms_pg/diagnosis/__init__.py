"""What this project tells of a running program over any backend: who is waited for, and where."""
