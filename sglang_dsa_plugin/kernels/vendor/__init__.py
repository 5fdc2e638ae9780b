"""Kernels of other packages behind the operator contract: what each needs is stated and converted here."""
