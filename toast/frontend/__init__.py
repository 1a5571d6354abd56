"""First stage: converts JAX functions and StableHLO to a :class:`toast.program.Program`."""
