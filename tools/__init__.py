"""What a developer runs: set-up, lint, runs with their exit codes explained, and the air-gapped bundle."""
