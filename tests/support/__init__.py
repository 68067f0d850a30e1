"""Shared test helpers and manual checks: models, loop drivers, random calls and loads. No tests."""
