"""Steps of nothing but decodes as graphs."""
