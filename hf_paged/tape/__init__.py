"""A forward as a tape: recorded once, run again by one C++ call."""
