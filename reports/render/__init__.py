"""Renderers of a scoreboard: terminal, JSON, Markdown, HTML, JUnit properties. Pure: a scoreboard in, text out."""
