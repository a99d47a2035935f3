"""Proofs that a way to bring a stack up carries the gates. They judge the suite's own machinery, not the stack."""
