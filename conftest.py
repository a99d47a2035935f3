"""Thin on purpose: all pytest mechanics live in ``fixtures.plugin``."""

pytest_plugins = ["fixtures.plugin"]
