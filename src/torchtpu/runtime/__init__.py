"""PJRT through JAX: devices, transfers, executables. Knows no operator."""
