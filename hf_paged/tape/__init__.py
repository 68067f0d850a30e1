"""A forward as a tape: recorded once, run again, on the CPU by one C++ call, on a GPU in fewer
launches."""
