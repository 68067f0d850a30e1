"""A forward on the CPU as a tape: its operations, recorded once, run again on the same memory by one C++ call."""
