"""What must hold: gates, benchmarks, workloads, checks, planted defects."""
