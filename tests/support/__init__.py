"""What the tests share and what is run by hand: models, drivers of loops, random calls and loads. No tests."""
